#!/usr/bin/env bash
# CISPO: the ratio is a bounded weight without a gradient, so no token loses its gradient.
#   SEED=1 bash examples/cispo/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
recipe cispo backward "$@"
train --policy-loss cispo --ratio-max 5 --loss-aggregation token_mean \
    --num-steps-per-rollout 4 --use-kl-loss --kl-loss-coef 0
