#!/usr/bin/env bash
# GRPO inside an agent program of yours (AGENT, a command), on eight GPUs. Without AGENT and DATA it is the game of agent.py.
#   MODEL=… DATA=… AGENT=… bash examples/agent_client/cluster.sh [--explain] [FLAGS OF train.py…]
source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
source scripts/python.sh
DATA="${DATA:-examples/agent_client/numbers.jsonl}"
cluster --agent-command "${AGENT:-$PYTHON examples/agent_client/agent.py}" --agent-concurrency 128 \
    --rm-type exact_match --advantage-estimator grpo --loss-aggregation prompt_mean \
    --rollout-batch-size 32 --n-samples-per-prompt 16 --num-rollout 1000 \
    --rollout-max-response-len 8192 --rollout-max-context-len 32768 --output-dir "$OUTPUTS/agent_client_cluster" "$@"
