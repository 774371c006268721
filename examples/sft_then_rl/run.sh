#!/usr/bin/env bash
# Supervised fine-tuning on demonstrations of mixed quality, then GRPO with the schema as the reward.
#   SEED=1 bash examples/sft_then_rl/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
if [ "${1:-}" != --smoke ]; then rm -rf "$OUTPUTS/tasks/base"; fi # the fine-tuning is part of this example
recipe sft_then_rl record "$@"
[ ${#SMOKE[@]} -eq 0 ] || fine_tune "$OUTPUTS/sft_then_rl_sft"
train --advantage-estimator grpo --loss-aggregation sample_mean \
    --eps-clip 0.2 --num-steps-per-rollout 4 --use-kl-loss --kl-loss-coef 0
