#!/usr/bin/env bash
# ScaleRL (arXiv 2510.13786): six GPUs train, two generate.
#   MODEL=… DATA=… bash examples/scalerl/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
PLACE=(--actor-num-gpus-per-node 6 --rollout-num-gpus 2)
cluster --rm-type math --policy-loss cispo --ratio-max 5 --advantage-estimator grpo_batch_std --loss-aggregation prompt_mean \
    --drop-zero-std-groups --max-prompt-pass-rate 0.9 --fully-async --async-steps 8 --use-rollout-logprobs --fp32-lm-head \
    --lr 5e-7 --lr-warmup-iters 100 --adam-eps 1e-15 --weight-decay 0.01 \
    --rollout-batch-size 48 --n-samples-per-prompt 16 --num-rollout 1000 \
    --rollout-max-prompt-len 2048 --rollout-max-response-len 14336 --thinking-min-len 10240 --thinking-max-len 12288 \
    --output-dir "$OUTPUTS/scalerl_cluster" "$@"
