#!/usr/bin/env bash
# Train a tiny Qwen3-MoE with GRPO on Megatron-Core, on two CPU processes: expert parallelism, load balancing, MTP.
#   SEED=1 bash examples/megatron_moe/run.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/venv.sh
source scripts/trains.sh

SEED="${SEED:-1}"
OUT=outputs/megatron_moe
if trains "$@"; then rm -rf "$OUT"; fi
[ -d "$OUT/model" ] || "$PYTHON" examples/megatron_moe/make_model.py "$OUT" --seed "$SEED"

"$PYTHON" train.py \
    --hf-checkpoint "$OUT/model" \
    --prompt-data "$OUT/prompts.jsonl" --input-key input --label-key label --rollout-shuffle \
    --custom-rm-path examples.megatron_moe.reward:share_of_letter \
    --num-rollout 20 --rollout-batch-size 8 --n-samples-per-prompt 8 \
    --rollout-max-response-len 8 --rollout-temperature 1.0 \
    --advantage-estimator grpo --loss-aggregation token_mean \
    --lr 3e-3 --lr-decay-style constant --clip-grad 1.0 \
    --train-backend megatron --fp32 --actor-num-gpus-per-node 2 --expert-model-parallel-size 2 \
    --use-dynamic-batch-size --max-tokens-per-gpu 1024 \
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 \
    --mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.2 \
    --rollout-engine torch --colocate \
    --save-hf "$OUT/hf" --output-dir "$OUT" \
    --seed "$SEED" --rollout-seed "$SEED" "$@"

if trains "$@"; then "$PYTHON" examples/megatron_moe/summary.py "$OUT/metrics.jsonl"; fi
