#!/usr/bin/env bash
# ScaleRL: CISPO over prompts, deviations of the batch, and generation that never waits for training.
#   SEED=1 bash examples/scalerl/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
recipe scalerl record "$@"
PLACE=()
# Random weights solve nothing, and the filter would drop every group. A penalty on the length differs within a group.
[ ${#SMOKE[@]} -eq 0 ] ||
    SMOKE+=(--rm-type json_schema:1,overlong:1 --overlong-max-len 36 --overlong-buffer-len 36)
train --lr 5e-4 --policy-loss cispo --ratio-max 5 --advantage-estimator grpo_batch_std --loss-aggregation prompt_mean \
    --dynamic-sampling-filter-path miles.rollout.filters:check_reward_nonzero_std \
    --max-prompt-pass-rate 0.9 --fully-async --async-steps 8 --use-rollout-logprobs --use-kl-loss --kl-loss-coef 0
