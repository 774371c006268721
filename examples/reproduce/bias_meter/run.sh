#!/usr/bin/env bash
# Measure bias and variance exactly, check some by sampling, and draw the picture: bash examples/reproduce/bias_meter/run.sh
# Writes outputs/bias_meter/results.csv and bias.png; OUT=folder writes elsewhere. One core, about two minutes.
set -euo pipefail
cd "$(dirname "$0")/../../.."
here=examples/reproduce/bias_meter
out=${OUT:-outputs/bias_meter}
python=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD
"$python" "$here/measure.py" "$out" --check 4000
"$python" "$here/plot.py" "$out/results.csv" "$out/bias.png"
if cmp -s "$out/results.csv" "$here/results.csv"; then
    echo "the same as the committed results"
else
    echo "not the same as the committed results: diff $out/results.csv $here/results.csv"
fi
