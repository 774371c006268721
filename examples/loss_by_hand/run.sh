#!/usr/bin/env bash
# Train one step on the worked example of docs/loss-aggregation.md in each of the four modes, and compare by hand.
#   bash examples/loss_by_hand/run.sh [MODEL_FOLDER]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/venv.sh

OUT=outputs/loss_by_hand
MODEL="$("$PYTHON" -m miles.commands.quickstart_parts.model "$@")" # refuses wrong words before results are removed
rm -rf "$OUT"
"$PYTHON" examples/loss_by_hand/make_samples.py "$OUT/samples.jsonl"

step() { # MODE [FLAGS...]
    local mode="$1"
    shift
    "$PYTHON" train.py \
        --hf-checkpoint "$MODEL" --load-debug-rollout-data "$OUT/samples.jsonl" \
        --num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 8 \
        --disable-rewards-normalization --loss-aggregation "$mode" "$@" \
        --fp32 --actor-num-gpus-per-node 1 --colocate --no-report --output-dir "$OUT/$mode" >"$OUT/$mode.log"
}
step sample_mean
step prompt_mean
step token_mean
step constant --loss-aggregation-divisor 8

"$PYTHON" examples/loss_by_hand/compare.py "$OUT"
