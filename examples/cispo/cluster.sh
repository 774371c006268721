#!/usr/bin/env bash
# CISPO (arXiv 2506.13585), on eight GPUs.
#   MODEL=… DATA=… bash examples/cispo/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
cluster --rm-type math --policy-loss cispo --ratio-max 5 --loss-aggregation token_mean --num-steps-per-rollout 16 \
    --rollout-batch-size 128 --n-samples-per-prompt 16 --num-rollout 1000 --rollout-max-response-len 16384 \
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-15 --output-dir "$OUTPUTS/cispo_cluster" "$@"
