#!/usr/bin/env bash
# Train SmolLM2-135M with GRPO to call a calculator, on two CPU cores.
#   SEED=1 bash examples/calculator_tool/run.sh [MODEL_FOLDER]
#   ENGINE=sglang SEED=1 bash examples/calculator_tool/run.sh    generate with SGLang, not the embedded engine
# Further flags are passed to train.py and override those below.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/venv.sh
source scripts/precision.sh
source scripts/trains.sh

SEED="${SEED:-1}"
ENGINE="${ENGINE:-torch}"
OUT=outputs/calculator_tool
FOLDER=()
if [ $# -gt 0 ] && [[ "$1" != --* ]]; then
    FOLDER=("$1")
    shift
fi
MODEL="$("$PYTHON" -m miles.commands.quickstart_parts.model "${FOLDER[@]}")"
if trains "$@"; then rm -rf "$OUT"; fi
[ -d "$OUT/data" ] || "$PYTHON" examples/calculator_tool/make_data.py "$OUT/data"

"$PYTHON" train.py \
    --hf-checkpoint "$MODEL" \
    --prompt-data "$OUT/data/train.jsonl" --input-key input --label-key label \
    --rollout-shuffle \
    --rm-type last_number \
    --custom-generate-function-path examples.calculator_tool.calculator:generate \
    --num-rollout 16 --rollout-batch-size 8 --n-samples-per-prompt 8 \
    --rollout-max-response-len 32 --rollout-temperature 1.0 \
    --advantage-estimator grpo --loss-aggregation sample_mean \
    --lr 1e-5 --lr-decay-style constant --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    --train-backend fsdp "$PRECISION" --use-dynamic-batch-size --max-tokens-per-gpu 1536 \
    --rollout-engine "$ENGINE" --actor-num-gpus-per-node 1 --colocate \
    --eval-prompt-data heldout "$OUT/data/heldout.jsonl" --eval-interval 8 --n-samples-per-eval-prompt 4 \
    --output-dir "$OUT" \
    --seed "$SEED" --rollout-seed "$SEED" "$@"

if trains "$@"; then "$PYTHON" -m miles.commands.quickstart_parts.summary "$OUT/metrics.jsonl" --label calculator_tool; fi
