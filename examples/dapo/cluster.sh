#!/usr/bin/env bash
# DAPO with the settings of its authors' code (arXiv 2503.14476), on eight GPUs.
#   MODEL=… DATA=… bash examples/dapo/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
cluster --rm-type dapo:1,overlong:1 --overlong-max-len 20480 --overlong-buffer-len 4096 --rollout-max-response-len 20480 \
    --advantage-estimator grpo --loss-aggregation token_mean --eps-clip 0.2 --eps-clip-high 0.28 \
    --rollout-batch-size 512 --n-samples-per-prompt 16 --num-steps-per-rollout 16 \
    --dynamic-sampling-filter-path miles.rollout.filters:check_deciding_reward_nonzero_std \
    --over-sampling-batch-size 1536 --rollout-max-prompt-len 2048 \
    --lr-warmup-iters 160 --weight-decay 0.1 --num-rollout 500 --output-dir "$OUTPUTS/dapo_cluster" "$@"
