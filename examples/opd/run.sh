#!/usr/bin/env bash
# On-policy distillation: the policy follows a teacher on its own answers; the reward is only measured.
#   SEED=1 bash examples/opd/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
TEACHER="$OUTPUTS/dapo/hf" # the model that the recipe dapo has trained
if [ "${1:-}" != --smoke ] && [ ! -d "$TEACHER" ] && trains "$@"; then bash examples/dapo/run.sh; fi
recipe opd record "$@"
if [ ${#SMOKE[@]} -gt 0 ]; then
    TEACHER="$POLICY"
elif [ ! -d "$TEACHER" ] && ! trains "$@"; then
    TEACHER="$POLICY" # of the same shape
fi
train --use-opd --opd-teacher-load "$TEACHER" --opd-kl-coef 1 --loss-aggregation token_mean \
    --rollout-batch-size 128 --n-samples-per-prompt 1 --num-steps-per-rollout 4 --use-kl-loss --kl-loss-coef 0
