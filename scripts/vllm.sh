#!/usr/bin/env bash
# Make the environment of --rollout-engine vllm on CPU: `bash scripts/vllm.sh`. It takes about two minutes, and 3.4 GB.
#   VLLM_VENV  its folder; default .venv-vllm next to the run's environment ($VENV, default .venv), where runs find it
# The environment is complete when its stamp holds the hash of scripts/vllm.txt; then nothing is installed.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"
VLLM_VENV="${VLLM_VENV:-$(dirname "$VENV")/.venv-vllm}"
LIST="$ROOT/scripts/vllm.txt"
STAMP="$(sha256sum "$LIST" | cut -d' ' -f1)"
if [ "$(cat "$VLLM_VENV/.miles-stamp" 2>/dev/null)" != "$STAMP" ]; then
    echo "vllm: installing into $VLLM_VENV (takes a few minutes)" >&2
    PYTHON="$VENV/bin/python"
    [ -x "$PYTHON" ] || PYTHON=python3
    "$PYTHON" -m venv "$VLLM_VENV"
    "$VLLM_VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$LIST"
    PYTHON="$VLLM_VENV/bin/python"
    "$PYTHON" -c 'import torchvision' 2>/dev/null || "$PYTHON" "$ROOT/scripts/torchvision_operators.py"
    "$PYTHON" -c 'import torchvision, vllm' >/dev/null
    echo "$STAMP" >"$VLLM_VENV/.miles-stamp"
fi
echo "vllm: $VLLM_VENV/bin/python"
