#!/usr/bin/env bash
# Dr.GRPO with settings of its authors' code (arXiv 2503.20783), on eight GPUs; README.md states what differs.
#   MODEL=… DATA=… bash examples/drgrpo/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
cluster --rm-type math --advantage-estimator grpo --disable-grpo-std-normalization \
    --loss-aggregation constant --loss-aggregation-divisor 3000 --rollout-max-response-len 3000 \
    --rollout-batch-size 128 --n-samples-per-prompt 8 --num-steps-per-rollout 8 --num-epoch 20 \
    --rollout-max-prompt-len 1024 --rollout-top-p 1 \
    --output-dir "$OUTPUTS/drgrpo_cluster" "$@"
