#!/usr/bin/env bash
# ScaleRL: CISPO over prompts, deviations of the batch, and generation that never waits for training.
#   SEED=1 bash examples/scalerl/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
recipe scalerl record "$@"
PLACE=()
train --lr 5e-4 --policy-loss cispo --ratio-max 5 --advantage-estimator grpo_batch_std --loss-aggregation prompt_mean \
    --drop-zero-std-groups --max-prompt-pass-rate 0.9 --fully-async --async-steps 8 --use-rollout-logprobs \
    --use-kl-loss --kl-loss-coef 0
