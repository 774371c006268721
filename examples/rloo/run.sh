#!/usr/bin/env bash
# RLOO: the reward minus the mean of the group's other rewards, four answers per prompt.
#   SEED=1 bash examples/rloo/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
recipe rloo backward "$@"
train --lr 5e-4 --advantage-estimator rloo --rollout-batch-size 32 --n-samples-per-prompt 4 \
    --loss-aggregation constant --loss-aggregation-divisor 8 \
    --use-kl-loss --kl-loss-type k3 --kl-loss-coef 0.03
