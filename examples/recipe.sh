# Source this from the run.sh and the cluster.sh of a recipe; it has what all of them share.
#   recipe NAME TASK "$@"   prepare a run on CPU; the arguments are run.sh's: [--smoke] [FLAGS OF train.py…]
#                          With --explain and other flags that do not train, earlier results stay.
#   train FLAGS             train with the flags of the recipe, and print the held-out accuracy before and after
#   cluster FLAGS "$@"      train on eight GPUs; --explain shows what that would do
# Environment: SEED=1, OUTPUTS=outputs (where all is written; --smoke: OUTPUTS/smoke),
# PYTHON (an interpreter; default: install .venv and use it).
# For cluster.sh: MODEL, DATA (a JSONL file with the columns prompt and label) and PYTHON (default: see scripts/python.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/trains.sh
SEED="${SEED:-1}"
OUTPUTS="${OUTPUTS:-outputs}"
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}" # the matrices are tiny: a waiting thread must not keep a core busy
IMAGES=(--multimodal-keys '{"image": "images"}')

PLACE=(--colocate) # of trainer and engine; a recipe that generates during training sets its own
# One trainer rank with the embedded engine, in fp32.
ON_CPU=(
    --device cpu --train-backend fsdp --fp32 --rollout-engine torch --actor-num-gpus-per-node 1
    --use-dynamic-batch-size --max-tokens-per-gpu 8192
    --lr-decay-style constant --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
)

recipe() {
    [ -n "${PYTHON:-}" ] || source scripts/venv.sh
    NAME="$1" TASK="$2"
    shift 2
    OUT="$OUTPUTS/$NAME"
    SMOKE=()
    SFT_STEPS=400
    if [ "${1:-}" = --smoke ]; then
        shift
        OUT="$OUTPUTS/smoke/$NAME" # not alongside trained models, which other recipes read
        SMOKE=(--num-rollout 2 --eval-interval 2 --n-samples-per-eval-prompt 1)
        SFT_STEPS=2
    fi
    MORE=("$@")
    if trains "${MORE[@]}"; then rm -rf "$OUT"; fi
    TASKS="$OUTPUTS/tasks" WRITE=examples.tasks.write
    [ "$TASK" != shop ] || TASKS="$OUTPUTS/shop_task" WRITE=examples.tools.write
    [ "$TASK" != count ] || TASKS="$OUTPUTS/count_task" WRITE=examples.vision.write
    [ -d "$TASKS/model" ] || "$PYTHON" -m "$WRITE" "$TASKS"
    case "$TASK" in
        backward) DATA_FLAGS=(--label-key label --rm-type exact_match --rollout-max-response-len 8) ;;
        record) DATA_FLAGS=(--rm-type json_schema --rollout-max-response-len 36) ;;
        shop) DATA_FLAGS=(--label-key label --rollout-max-response-len 48 --rollout-max-context-len 96) ;;
        count) DATA_FLAGS=("${IMAGES[@]}" --label-key label --rm-type exact_match --rollout-max-response-len 4) ;;
        *) echo "recipe: $TASK is no task; give backward, record, shop or count" >&2 && return 2 ;;
    esac
    POLICY=examples/tasks/base
    [ "$TASK" != shop ] || POLICY=examples/tools/base
}

fine_tune() { # FOLDER SEED [FLAGS]: train the random model on the demonstrations of its tasks; export it to FOLDER/hf
    rm -rf "$1"
    "$PYTHON" train.py "${ON_CPU[@]}" \
        --hf-checkpoint "$TASKS/model" --prompt-data "$TASKS/chats.jsonl" --input-key chat --rollout-shuffle \
        --loss-type sft_loss --debug-train-only --loss-aggregation token_mean \
        --num-rollout "$SFT_STEPS" --rollout-batch-size 64 --n-samples-per-prompt 1 --rollout-max-response-len 40 \
        --lr 5e-3 --lr-warmup-iters 20 --lr-decay-style cosine \
        --save-hf "$1/hf" --output-dir "$1" --seed "$2" --rollout-seed "$2" "${@:3}"
}

train() {
    "$PYTHON" train.py "${ON_CPU[@]}" "${PLACE[@]}" \
        --hf-checkpoint "$POLICY" --prompt-data "$TASKS/$TASK/train.jsonl" --apply-chat-template --rollout-shuffle \
        "${DATA_FLAGS[@]}" \
        --num-rollout 20 --rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-temperature 1.0 --lr 2e-4 \
        --eval-prompt-data heldout "$TASKS/$TASK/heldout.jsonl" --eval-interval 10 --n-samples-per-eval-prompt 4 \
        --output-dir "$OUT" --save-hf "$OUT/hf" --seed "$SEED" --rollout-seed "$SEED" \
        "$@" "${SMOKE[@]}" "${MORE[@]}"
    if trains "${MORE[@]}"; then "$PYTHON" -m miles.commands.quickstart_parts.summary "$OUT/metrics.jsonl" --label "$NAME"; fi
}

cluster() {
    source scripts/python.sh
    "$PYTHON" train.py \
        --device cuda --train-backend fsdp --rollout-engine sglang --actor-num-nodes 1 --actor-num-gpus-per-node 8 "${PLACE[@]}" \
        --hf-checkpoint "${MODEL:-Qwen/Qwen3-4B}" \
        --prompt-data "${DATA:-examples/from_scripts/problems.jsonl}" --input-key prompt --label-key label \
        --apply-chat-template --rollout-shuffle --rollout-temperature 1.0 \
        --use-dynamic-batch-size --max-tokens-per-gpu 16384 --gradient-checkpointing \
        --lr 1e-6 --lr-decay-style constant --clip-grad 1.0 --seed "$SEED" --rollout-seed "$SEED" "$@"
}
