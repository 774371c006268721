#!/usr/bin/env bash
# On-policy distillation from a larger model (arXiv 2306.13649), on eight GPUs.
#   MODEL=… DATA=… bash examples/opd/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
cluster --use-opd --opd-teacher-load "${TEACHER:-Qwen/Qwen3-32B}" --rm-type zero --loss-aggregation token_mean \
    --rollout-batch-size 256 --n-samples-per-prompt 1 --num-rollout 500 --rollout-max-response-len 8192 \
    --output-dir "$OUTPUTS/opd_cluster" "$@"
