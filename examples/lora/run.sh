#!/usr/bin/env bash
# GRPO of a low-rank adapter; all other weights stay unchanged.
#   SEED=1 bash examples/lora/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
recipe lora record "$@"
train --lora-rank 8 --lora-alpha 16 --lr 2e-3 --advantage-estimator grpo --loss-aggregation sample_mean \
    --eps-clip 0.2 --num-steps-per-rollout 4 --use-kl-loss --kl-loss-coef 0
