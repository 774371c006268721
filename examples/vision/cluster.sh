#!/usr/bin/env bash
# GRPO of a vision-language model with its tower, on eight GPUs. DATA has the columns prompt, images and label.
#   MODEL=… DATA=… bash examples/vision/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
MODEL="${MODEL:-Qwen/Qwen2.5-VL-3B-Instruct}" DATA="${DATA:-examples/vision/problems.jsonl}"
cluster "${IMAGES[@]}" --rm-type math --advantage-estimator grpo --loss-aggregation sample_mean \
    --rollout-batch-size 32 --n-samples-per-prompt 16 --num-rollout 1000 --rollout-max-response-len 4096 \
    --output-dir "$OUTPUTS/vision_cluster" "$@"
