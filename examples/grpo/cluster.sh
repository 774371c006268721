#!/usr/bin/env bash
# GRPO with the batch and the KL coefficient of DeepSeek-R1-Zero (arXiv 2501.12948), on eight GPUs.
#   MODEL=… DATA=… bash examples/grpo/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
cluster --rm-type math --advantage-estimator grpo --loss-aggregation sample_mean \
    --use-kl-loss --kl-loss-type k3 --kl-loss-coef 0.001 \
    --rollout-batch-size 32 --n-samples-per-prompt 16 --global-batch-size 512 \
    --num-rollout 1000 --rollout-max-response-len 16384 --output-dir "$OUTPUTS/grpo_cluster" "$@"
