#!/usr/bin/env bash
# GRPO with a judge that is served elsewhere (JUDGE_URL, JUDGE_MODEL), on eight GPUs.
#   MODEL=… DATA=… bash examples/judge/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
cluster --rm-type judge --judge-url "${JUDGE_URL:-http://127.0.0.1:8000/v1}" --judge-model "${JUDGE_MODEL:-Qwen/Qwen3-32B}" \
    --judge-cache "$OUTPUTS/judge_cluster.sqlite" --advantage-estimator grpo --loss-aggregation sample_mean \
    --rollout-batch-size 32 --n-samples-per-prompt 16 --num-rollout 1000 --rollout-max-response-len 8192 \
    --output-dir "$OUTPUTS/judge_cluster" "$@"
