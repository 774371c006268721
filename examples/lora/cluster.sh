#!/usr/bin/env bash
# GRPO of a low-rank adapter (arXiv 2106.09685), on eight GPUs.
#   MODEL=… DATA=… bash examples/lora/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
cluster --rm-type math --lora-rank 32 --lora-alpha 64 --lr 1e-5 --advantage-estimator grpo --loss-aggregation sample_mean \
    --rollout-batch-size 32 --n-samples-per-prompt 16 --num-rollout 1000 --rollout-max-response-len 8192 \
    --output-dir "$OUTPUTS/lora_cluster" "$@"
