#!/usr/bin/env bash
# Learn to call a tool, in an environment with several turns.
#   SEED=1 bash examples/tools/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
recipe tools shop "$@"
train --environment examples.tools.environments:Shop --rm-type environment \
    --advantage-estimator grpo --loss-aggregation token_mean \
    --eps-clip 0.2 --num-steps-per-rollout 4 --use-kl-loss --kl-loss-coef 0
