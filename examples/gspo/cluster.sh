#!/usr/bin/env bash
# GSPO with the clip range of the paper (arXiv 2507.18071), on eight GPUs.
#   MODEL=… DATA=… bash examples/gspo/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
cluster --rm-type math --advantage-estimator gspo --loss-aggregation sample_mean \
    --eps-clip 3e-4 --eps-clip-high 4e-4 --num-steps-per-rollout 4 \
    --rollout-batch-size 128 --n-samples-per-prompt 8 --num-rollout 1000 --rollout-max-response-len 16384 \
    --output-dir "$OUTPUTS/gspo_cluster" "$@"
