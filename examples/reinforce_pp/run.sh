#!/usr/bin/env bash
# REINFORCE++ with its baseline: the reward less its group's mean, whitened over the whole step.
#   SEED=1 bash examples/reinforce_pp/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
recipe reinforce_pp backward "$@"
train --advantage-estimator reinforce_plus_plus_baseline --normalize-advantages --kl-coef 0.01 \
    --loss-aggregation token_mean --eps-clip 0.2 --num-steps-per-rollout 4
