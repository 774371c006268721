#!/usr/bin/env bash
# Problems with a calculator as a tool, on eight GPUs.
#   MODEL=… DATA=… bash examples/tools/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
cluster --environment examples.tools.environments:Calculator --rm-type math \
    --advantage-estimator grpo --loss-aggregation token_mean --eps-clip 0.2 --num-steps-per-rollout 4 \
    --rollout-batch-size 128 --n-samples-per-prompt 8 --num-rollout 500 \
    --rollout-max-response-len 8192 --rollout-max-context-len 10240 --output-dir "$OUTPUTS/tools_cluster" "$@"
