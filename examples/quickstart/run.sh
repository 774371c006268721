#!/usr/bin/env bash
# Train SmolLM2-135M on one-digit products with GRPO, on two CPU cores.
#   SEED=1 bash examples/quickstart/run.sh [MODEL_FOLDER]
#   ENGINE=sglang SEED=1 bash examples/quickstart/run.sh        generate with SGLang, not the embedded engine
#   ENGINE=vllm SEED=1 bash examples/quickstart/run.sh          generate with vLLM (docs/vllm.md)
#   BACKEND=megatron SEED=1 bash examples/quickstart/run.sh     train with Megatron-Core, not FSDP2
#   PYTHON=python3 SEED=1 bash examples/quickstart/run.sh        use this interpreter unchanged; install nothing
# It runs `miles quickstart`. Further flags go to train.py and override the settings of the quickstart:
#   BACKEND=megatron bash examples/quickstart/run.sh --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ -n "${PYTHON:-}" ] || source scripts/venv.sh

SEED="${SEED:-1}"
ENGINE="${ENGINE:-torch}"
BACKEND="${BACKEND:-fsdp}"
OUT=outputs/quickstart
FOLDER=()
if [ $# -gt 0 ] && [[ "$1" != --* ]]; then
    FOLDER=("$1")
    shift
fi
exec "$PYTHON" -m miles quickstart "${FOLDER[@]}" --output-dir "$OUT" --seed "$SEED" \
    --train-backend "$BACKEND" --rollout-engine "$ENGINE" "$@"
