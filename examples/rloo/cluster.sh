#!/usr/bin/env bash
# RLOO with the batch and the KL coefficient of the paper (arXiv 2402.14740), on eight GPUs.
#   MODEL=… DATA=… bash examples/rloo/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
cluster --rm-type math --advantage-estimator rloo --rollout-batch-size 128 --n-samples-per-prompt 4 --global-batch-size 512 \
    --loss-aggregation constant --loss-aggregation-divisor 4096 --rollout-max-response-len 4096 \
    --use-kl-loss --kl-loss-type k3 --kl-loss-coef 0.03 --num-rollout 1000 --output-dir "$OUTPUTS/rloo_cluster" "$@"
