#!/usr/bin/env bash
# PPO with settings of Open-Reasoner-Zero's code (arXiv 2503.24290), on eight GPUs; README.md states what differs.
#   MODEL=… DATA=… bash examples/ppo/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
cluster --rm-type math --advantage-estimator ppo --gamma 1 --lambd 1 --normalize-advantages \
    --lr 1e-6 --critic-lr 5e-6 --lr-warmup-iters 50 --critic-lr-warmup-iters 50 \
    --rollout-batch-size 128 --n-samples-per-prompt 64 --num-epoch 20 \
    --rollout-max-prompt-len 2048 --rollout-max-response-len 8000 --output-dir "$OUTPUTS/ppo_cluster" "$@"
