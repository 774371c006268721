#!/usr/bin/env bash
# REINFORCE++ with its baseline (arXiv 2501.03262), on eight GPUs.
#   MODEL=… DATA=… bash examples/reinforce_pp/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
cluster --rm-type math --advantage-estimator reinforce_plus_plus_baseline --normalize-advantages --kl-coef 0.01 \
    --loss-aggregation token_mean --eps-clip 0.2 --num-steps-per-rollout 4 \
    --rollout-batch-size 128 --n-samples-per-prompt 8 --num-rollout 1000 --rollout-max-response-len 8192 \
    --output-dir "$OUTPUTS/reinforce_pp_cluster" "$@"
