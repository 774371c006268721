#!/usr/bin/env bash
# PPO with the settings of Open-Reasoner-Zero's code (arXiv 2503.24290), on eight GPUs.
#   MODEL=… DATA=… bash examples/ppo/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
cluster --rm-type math --advantage-estimator ppo --gamma 1 --lambd 1 --normalize-advantages \
    --lr 1e-6 --critic-lr 5e-6 --num-critic-only-steps 50 --rollout-batch-size 128 --n-samples-per-prompt 64 \
    --num-rollout 1000 --rollout-max-response-len 8192 --output-dir "$OUTPUTS/ppo_cluster" "$@"
