#!/usr/bin/env bash
# Train a tiny model inside an agent program that knows OpenAI's client only, on two CPU cores.
#   SEED=1 bash examples/agent_client/run.sh [--smoke]
#   OUTPUTS=outputs is where all is written (--smoke: OUTPUTS/smoke).
#   PYTHON is an interpreter (default: install .venv and use it).
# Further flags are passed to train.py and override those below.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ -n "${PYTHON:-}" ] || source scripts/venv.sh
source scripts/trains.sh
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}" # the matrices are tiny: a waiting thread must not keep a core busy

SEED="${SEED:-1}"
OUT="${OUTPUTS:-outputs}/agent_client"
SMOKE=()
if [ "${1:-}" = --smoke ]; then
    shift
    OUT="${OUTPUTS:-outputs}/smoke/agent_client"
    SMOKE=(--num-rollout 2 --rollout-batch-size 2 --n-samples-per-prompt 2 --eval-interval 2 --n-samples-per-eval-prompt 1)
fi
if trains "$@"; then rm -rf "$OUT"; fi
[ -d "$OUT/data" ] || "$PYTHON" examples/agent_client/make_data.py "$OUT/data"

"$PYTHON" train.py \
    --agent-command "$PYTHON examples/agent_client/agent.py" --agent-concurrency 4 \
    --hf-checkpoint "$OUT/data/model" \
    --prompt-data "$OUT/data/prompts.jsonl" --input-key input --label-key label \
    --apply-chat-template --rollout-shuffle \
    --rm-type exact_match \
    --num-rollout 12 --rollout-batch-size 3 --n-samples-per-prompt 16 \
    --rollout-max-response-len 32 --rollout-max-context-len 64 \
    --advantage-estimator grpo --loss-aggregation prompt_mean \
    --lr 5e-3 --lr-decay-style constant --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    --device cpu --train-backend fsdp --fp32 --use-dynamic-batch-size --max-tokens-per-gpu 4096 \
    --rollout-engine torch --actor-num-gpus-per-node 1 --colocate \
    --eval-prompt-data heldout "$OUT/data/prompts.jsonl" --eval-interval 6 --n-samples-per-eval-prompt 20 \
    --output-dir "$OUT" \
    --seed "$SEED" --rollout-seed "$SEED" "${SMOKE[@]}" "$@"

if trains "$@"; then "$PYTHON" -m miles.commands.quickstart_parts.summary "$OUT/metrics.jsonl" --label agent_client; fi
