#!/usr/bin/env bash
# GRPO with the scores of a judge behind an OpenAI-compatible URL.
#   SEED=1 bash examples/judge/run.sh [--smoke] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
recipe judge backward "$@"
exec {ADDRESS}< <(exec "$PYTHON" examples/judge/judge.py)
trap "kill $! 2>/dev/null || true" EXIT
read -r URL <&"$ADDRESS" # the judge prints it once it listens
train --rm-type judge --judge-url "$URL" --judge-model rules --judge-template examples/judge/template.txt \
    --advantage-estimator grpo --loss-aggregation sample_mean \
    --eps-clip 0.2 --num-steps-per-rollout 4 --use-kl-loss --kl-loss-coef 0
