#!/usr/bin/env bash
# Repeat recipes with the seeds 1 to SEEDS, all from the same weights, and keep the accuracies in their seeds.csv.
#   SEEDS=4 bash examples/tasks/seeds.sh grpo dapo
# miles sweep repeats the command that run.sh gives. Recipes that generate and train alternately run in one process each, which
# gives the same numbers sooner. opd's teacher is trained by run.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
for NAME in "$@"; do
    if [ "$NAME" = agent_client ] || [ "$NAME" = sft_then_rl ] || [ "$NAME" = vision ]; then
        echo "seeds.sh: $NAME does more than train.py does once, and is not repeated here. For each N run" \
            "OUTPUTS=outputs/sN SEED=N bash examples/$NAME/run.sh" >&2
        exit 2
    fi
done
[ -n "${PYTHON:-}" ] || source scripts/venv.sh
export PYTHON
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
FOLDER="$(mktemp -d)"
JUDGE=""
trap 'rm -rf "$FOLDER"; [ -z "$JUDGE" ] || kill "$JUDGE" 2>/dev/null || true' EXIT

# Instead of the interpreter: print the flags of train.py, and start no judge.
printf '#!/usr/bin/env bash\ncase "$1" in\ntrain.py) shift; printf "%%q " "$@" ;;\n*judge.py) echo %s ;;\nesac\n' \
    http://127.0.0.1:9/v1 >"$FOLDER/words"
chmod +x "$FOLDER/words"

[ -d outputs/tasks/model ] || "$PYTHON" -m examples.tasks.write outputs/tasks
[ -d outputs/shop_task/model ] || "$PYTHON" -m examples.tools.write outputs/shop_task
for NAME in "$@"; do
    SWEEP="outputs/seeds/$NAME" HOW=()
    [ "$NAME" != opd ] || [ -d outputs/dapo/hf ] || bash examples/dapo/run.sh
    WORDS="$(PYTHON="$FOLDER/words" bash "examples/$NAME/run.sh" --explain)"
    [[ "$WORDS" != *" --colocate "* ]] || HOW=(--one-process)
    if [ "$NAME" = judge ]; then
        exec {ADDRESS}< <(exec "$PYTHON" examples/judge/judge.py)
        JUDGE=$!
        read -r URL <&"$ADDRESS"
        WORDS="${WORDS/http:\/\/127.0.0.1:9\/v1/$URL}"
    fi
    # The sweep sets these itself.
    WORDS="$(sed -E 's/ --(output-dir|seed|rollout-seed) [^ ]+//g; s/ --explain.*//' <<<"$WORDS")"
    rm -rf "$SWEEP"
    mkdir -p "$SWEEP"
    printf 'flags: >-\n  %s\nvariants:\n  run: {}\nseeds: %s\n' "$WORDS" "${SEEDS:-4}" >"$SWEEP/sweep.yaml"
    "$PYTHON" -m miles sweep "$SWEEP/sweep.yaml" "${HOW[@]}" --out "$SWEEP"
    "$PYTHON" examples/tasks/curves.py seeds "$SWEEP"
done
