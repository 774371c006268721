#!/usr/bin/env bash
# Dr.GRPO: no division by lengths that depend on the answer, and none by the group's deviation.
#   SEED=1 bash examples/drgrpo/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
recipe drgrpo backward "$@"
train --advantage-estimator grpo --disable-grpo-std-normalization \
    --loss-aggregation constant --loss-aggregation-divisor 8 \
    --eps-clip 0.2 --num-steps-per-rollout 4 --use-kl-loss --kl-loss-coef 0
