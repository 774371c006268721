#!/usr/bin/env bash
# Make a model like those in examples/tasks/base (TASK record) and examples/tools/base (TASK shop): train the random model
# of the task on its demonstrations. Another processor or version rounds differently and gives other weights.
#   bash examples/tasks/make_base.sh TASK     writes outputs/base_TASK/hf
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
recipe "base_$1" "$1"
fine_tune "$OUT" "$SEED"
