#!/usr/bin/env bash
# Measure bias and variance exactly, check some by sampling, and draw the picture.
#   bash examples/reproduce/bias_meter/run.sh
# Writes outputs/bias_meter/results.csv and bias.png; OUT=folder writes elsewhere. One core, about two minutes.
# PYTHON is an interpreter (default: install .venv and use it).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
[ -n "${PYTHON:-}" ] || source scripts/venv.sh

HERE=examples/reproduce/bias_meter
OUT=${OUT:-outputs/bias_meter}
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD
"$PYTHON" "$HERE/measure.py" "$OUT" --check 4000
"$PYTHON" "$HERE/plot.py" "$OUT/results.csv" "$OUT/bias.png"
if cmp -s "$OUT/results.csv" "$HERE/results.csv"; then
    echo "the same as the committed results"
else
    echo "not the same as the committed results: diff $OUT/results.csv $HERE/results.csv"
fi
