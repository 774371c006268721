#!/usr/bin/env bash
# GSPO: one ratio per answer, clipped in a range about six times narrower.
#   SEED=1 bash examples/gspo/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
recipe gspo backward "$@"
train --advantage-estimator gspo --loss-aggregation sample_mean \
    --eps-clip 0.03 --eps-clip-high 0.04 --num-steps-per-rollout 4 --use-kl-loss --kl-loss-coef 0
