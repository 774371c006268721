#!/usr/bin/env bash
# Run the quickstart on greatest common divisors that reasoning-gym generates.
#   SEED=1 bash examples/quickstart/gcd.sh [MODEL_FOLDER]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/venv.sh
source scripts/precision.sh

SEED="${SEED:-1}"
OUT=outputs/quickstart-gcd
MODEL="$("$PYTHON" -m miles.commands.quickstart_parts.model "$@")" # refuses wrong words before results are removed
rm -rf "$OUT"

# Training and held-out tasks are of the same kind; they differ in the seed of the generator.
"$PYTHON" train.py \
    --hf-checkpoint "$MODEL" \
    --prompt-data reasoning_gym:gcd:size=512,seed=1,max_value=10 \
    --apply-chat-template --rollout-shuffle \
    --rm-type last_number \
    --num-rollout 34 --rollout-batch-size 8 --n-samples-per-prompt 8 \
    --rollout-max-response-len 24 --rollout-temperature 1.0 \
    --advantage-estimator grpo --loss-aggregation sample_mean \
    --use-kl-loss --kl-loss-coef 0.0 --kl-loss-type low_var_kl \
    --lr 1e-5 --lr-decay-style constant --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    --train-backend fsdp "$PRECISION" --use-dynamic-batch-size --max-tokens-per-gpu 4096 \
    --rollout-engine torch --actor-num-gpus-per-node 1 --colocate \
    --eval-prompt-data heldout reasoning_gym:gcd:size=32,seed=2,max_value=10 --eval-interval 12 --n-samples-per-eval-prompt 4 \
    --save "$OUT/checkpoints" --save-hf "$OUT/hf" --output-dir "$OUT" \
    --seed "$SEED" --rollout-seed "$SEED"

"$PYTHON" -m miles.commands.quickstart_parts.summary "$OUT/metrics.jsonl" --label quickstart-gcd
