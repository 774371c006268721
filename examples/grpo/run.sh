#!/usr/bin/env bash
# GRPO: a small model learns to spell words backward, on two CPU cores.
#   SEED=1 bash examples/grpo/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
recipe grpo backward "$@"
train --advantage-estimator grpo --loss-aggregation sample_mean \
    --use-kl-loss --kl-loss-type k3 --kl-loss-coef 0.001 \
    --eps-clip 0.2 --num-steps-per-rollout 4
