#!/usr/bin/env bash
# Supervised fine-tuning on conversations (CHATS), then GRPO from its export, on eight GPUs.
#   MODEL=… DATA=… bash examples/sft_then_rl/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
SFT="$OUTPUTS/sft_then_rl_cluster_sft"
cluster --prompt-data "${CHATS:-examples/sft_then_rl/chats.jsonl}" --input-key messages \
    --loss-type sft_loss --debug-train-only --loss-aggregation token_mean \
    --rollout-batch-size 128 --num-epoch 3 --rollout-max-response-len 16384 --lr 1e-5 --lr-decay-style cosine \
    --save-hf "$SFT/hf" --output-dir "$SFT" "$@"
# With --explain nothing is trained, so the second part is explained for the model that the first one starts from.
[ ! -d "$SFT/hf" ] || MODEL="$SFT/hf"
cluster --rm-type math --advantage-estimator grpo --loss-aggregation sample_mean \
    --rollout-batch-size 32 --n-samples-per-prompt 16 --num-rollout 1000 --rollout-max-response-len 16384 \
    --output-dir "$OUTPUTS/sft_then_rl_cluster" "$@"
