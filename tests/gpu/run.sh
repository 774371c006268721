#!/usr/bin/env bash
# Run what this machine's GPU and packages allow; end with a page of figures, OUT/page.md, which is printed too.
#   bash tests/gpu/run.sh [OUT]             OUT: a folder for logs, models and the page; default outputs/gpu
#   DEVICE=cpu bash tests/gpu/run.sh OUT    try the parts themselves without a GPU, with a small model
#   PYTHON=… the interpreter (default: python3, as it is); QUICKSTART=FOLDER also trains the quickstart's model
#   PARTS=REGEX runs the parts whose names match, where time is limited: PARTS='model|step'
#   BUDGET=SECONDS for all parts (default: 900). The most important run first, and the last ones may get no time.
# A part that cannot run is skipped with its reason. The exit status is 1 if a part failed or was stopped, or none ran.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHON="${PYTHON:-python3}" DEVICE="${DEVICE:-cuda}" PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH}"
OUT="${1:-outputs/gpu}"
mkdir -p "$OUT" && OUT="$(cd "$OUT" && pwd)" || exit 1
rm -f "$OUT"/*.json "$OUT"/*.xml "$OUT"/*.txt "$OUT"/*.log "$OUT"/*.store "$OUT"/parts.tsv
MODEL="$OUT/models/qwen3"
BUDGET="${BUDGET:-900}"
SKIPPED=77 # an exit status; the output has a line "skipped: REASON"
failed=0 ran=0

note() { # note NAME STATUS SECONDS REASON
    printf '%s\t%s\t%s\t%s\n' "$@" >>"$OUT/parts.tsv"
    printf '%-8s %s (%s s) %s\n' "$2" "$1" "$3" "$4"
}

missing() { # print the first of the modules that cannot be imported
    for module in "$@"; do
        "$PYTHON" -c "import $module" >/dev/null 2>&1 || { echo "$module"; return; }
    done
}

part() { # part NAME "MODULES" SECONDS COMMAND...: run it with a time limit; its output is OUT/NAME.log
    local name="$1" modules="$2" limit="$3" left=$((BUDGET - SECONDS)) absent started status why
    shift 3
    if ! [[ "$name" =~ ${PARTS:-.} ]]; then note "$name" skipped 0 "not in PARTS=$PARTS"; return 1; fi
    absent="$(missing $modules)"
    if [ -n "$absent" ]; then note "$name" skipped 0 "cannot import $absent"; return 1; fi
    if [ $left -lt 10 ]; then note "$name" skipped 0 "no time is left of BUDGET=$BUDGET"; return 1; fi
    why="over $limit s"
    if [ $left -lt "$limit" ]; then limit=$left why="BUDGET=$BUDGET is used up"; fi
    started=$SECONDS
    timeout --signal=INT --kill-after=30 "$limit" "$@" >"$OUT/$name.log" 2>&1
    status=$?
    if [ $status -eq 0 ]; then
        ran=$((ran + 1))
        note "$name" ok $((SECONDS - started)) ""
    elif [ $status -eq $SKIPPED ]; then
        note "$name" skipped $((SECONDS - started)) "$(sed -n 's/^skipped: //p' "$OUT/$name.log")"
    else
        failed=1
        case $status in 124 | 137) status="$status, $why" ;; esac
        note "$name" FAILED $((SECONDS - started)) "exit status $status; $name.log"
        tail -n 25 "$OUT/$name.log"
    fi
    [ "$status" = 0 ]
}

tests() { # tests NAME SECONDS WORKERS FILES...: tests of this folder, whose results are on the page one by one
    local name="$1" limit="$2" workers="$3"
    shift 3
    if [ "$DEVICE" != cuda ]; then note "$name" skipped 0 "these tests need a GPU"; return; fi
    part "$name" "pytest" "$limit" "$PYTHON" tests/gpu/run_tests.py "$OUT/$name.xml" -n "$workers" -s "${@/#/tests/gpu/}"
}

if [ "$DEVICE" = cuda ]; then
    small=() timing=() micro=8192 sample=2048 prompts=8 answer=256
    if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        note environment skipped 0 "PyTorch finds no GPU"
        echo "NOT TESTED: PyTorch finds no GPU; DEVICE=cpu tries the parts themselves"
        exit 1
    fi
else
    small=(--small) timing=(--warm-up 0 --steps 1) micro=256 sample=64 prompts=2 answer=8
fi

step() { # step NAME BACKEND MICRO_TOKENS [FLAGS]: a measured training step
    local needs="torch"
    [ "$2" = fsdp ] || needs="megatron.core"
    part "$1" "$needs" 240 "$PYTHON" tests/gpu/train_step.py "$MODEL" "$OUT/$1.json" --device "$DEVICE" \
        --backend "$2" --micro-tokens "$3" --micro-batches 4 --sample-tokens "$sample" --flags "${4:-}" "${timing[@]}"
}
launch() { # launch NAME BACKEND ITERATIONS [FLAGS...]: a run through Ray on one device
    local name="$1" backend="$2" iterations="$3" needs="ray argparse_dataclass"
    shift 3
    [ "$backend" = fsdp ] || needs="$needs megatron.core"
    part "$name" "$needs" 400 "$PYTHON" train.py --device "$DEVICE" --bf16 --hf-checkpoint "$MODEL" \
        --prompt-data "$OUT/models/prompts.jsonl" --input-key input --label-key label --apply-chat-template \
        --custom-rm-path spread_reward:spread --num-rollout "$iterations" \
        --rollout-batch-size $prompts --n-samples-per-prompt 8 --rollout-max-response-len $answer \
        --lr 1e-6 --lr-decay-style constant --use-kl-loss --kl-loss-type low_var_kl \
        --train-backend "$backend" --use-dynamic-batch-size --max-tokens-per-gpu $((2 * micro)) \
        --rollout-engine torch --actor-num-gpus-per-node 1 --colocate --output-dir "$OUT/$name" "$@"
}
engine() { # engine KIND: check one SGLang server on CPU, of a kind that it serves there; on a GPU, tests do that
    [ "$DEVICE" = cuda ] && return
    part "sglang-$1" "sglang" 400 "$PYTHON" tests/gpu/sglang_engine.py "$1" "$OUT/sglang-$1"
}

rm -rf "$OUT"/run-* "$OUT"/sglang-*/ "$OUT"/checkpoints
part environment "torch transformers" 60 "$PYTHON" tests/gpu/page.py environment "$OUT/environment.json"
tests gradients 240 0 test_one_gpu.py
part model "transformers" 120 "$PYTHON" tests/gpu/make_model.py "$OUT/models" "${small[@]}"
launch run-fsdp fsdp 5 --save "$OUT/checkpoints"
tests sglang-families 300 3 test_sglang_families_gpu.py
engine stop
engine qwen3
tests sglang-runs 240 0 test_sglang_runs_gpu.py
step step-fsdp fsdp $micro
step step-megatron megatron $micro
tests offloaded 240 0 test_offloaded_optimizer.py test_offloaded_trainer.py
tests sglang 300 0 test_sglang_gpu.py
[ ! -d "$OUT/checkpoints" ] ||
    launch run-fsdp-resumed fsdp 7 --save "$OUT/checkpoints" --load "$OUT/checkpoints"
launch run-megatron megatron 5
step step-fsdp-double fsdp $((2 * micro))
step step-fsdp-whole-logits fsdp $micro "--log-probs-chunk-size -1"
if [ -n "${QUICKSTART:-}" ]; then
    part run-quickstart "ray argparse_dataclass" 500 bash examples/quickstart/run.sh "$QUICKSTART" --device "$DEVICE"
    mkdir -p "$OUT/run-quickstart" && cp outputs/quickstart/metrics.jsonl "$OUT/run-quickstart/"
else
    note run-quickstart skipped 0 "QUICKSTART names no model folder"
fi

"$PYTHON" tests/gpu/page.py page "$OUT" >"$OUT/page.md" || failed=1
cat "$OUT/page.md"
[ $failed -eq 0 ] && [ $ran -gt 0 ]
