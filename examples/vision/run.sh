#!/usr/bin/env bash
# Supervised fine-tuning of a random vision-language model on mixed demonstrations, then GRPO on prompts with images.
#   SEED=1 bash examples/vision/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
recipe vision count "$@"
POLICY="$TASKS/model"
if trains "${MORE[@]}"; then
    [ "$SFT_STEPS" = 2 ] || SFT_STEPS=200
    fine_tune "${OUT}_sft" "$SEED" "${IMAGES[@]}" --lr 1e-3
    POLICY="${OUT}_sft/hf"
fi
train --advantage-estimator grpo --loss-aggregation sample_mean --num-rollout 30 --eval-interval 10 --lr 3e-4 \
    --use-kl-loss --kl-loss-coef 0
