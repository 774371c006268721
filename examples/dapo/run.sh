#!/usr/bin/env bash
# DAPO: clip-higher, dynamic sampling, token_mean and the penalty on long answers.
#   SEED=1 bash examples/dapo/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
recipe dapo record "$@"
train --rm-type json_schema:1,overlong:1 --overlong-max-len 36 --overlong-buffer-len 4 \
    --advantage-estimator grpo --loss-aggregation token_mean \
    --eps-clip 0.2 --eps-clip-high 0.28 --num-steps-per-rollout 4 --use-kl-loss --kl-loss-coef 0 \
    --dynamic-sampling-filter-path miles.rollout.filters:check_reward_nonzero_std --over-sampling-batch-size 24
