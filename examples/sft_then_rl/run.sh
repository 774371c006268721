#!/usr/bin/env bash
# Supervised fine-tuning on mixed demonstrations, then GRPO with a schema as the reward.
#   SEED=1 bash examples/sft_then_rl/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
recipe sft_then_rl record "$@"
if trains "${MORE[@]}"; then
    fine_tune "${OUT}_sft" "$SEED"
    POLICY="${OUT}_sft/hf"
fi
train --advantage-estimator grpo --loss-aggregation sample_mean \
    --eps-clip 0.2 --num-steps-per-rollout 4 --use-kl-loss --kl-loss-coef 0
