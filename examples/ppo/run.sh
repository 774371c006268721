#!/usr/bin/env bash
# PPO with a critic that learns alongside the policy.
#   SEED=1 bash examples/ppo/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
recipe ppo backward "$@"
[ ${#SMOKE[@]} -eq 0 ] || SMOKE+=(--num-critic-only-steps 1)
train --advantage-estimator ppo --gamma 1 --lambd 1 --normalize-advantages \
    --critic-lr 1e-3 --num-critic-only-steps 5 --eps-clip 0.2 --num-steps-per-rollout 4 --use-kl-loss --kl-loss-coef 0
