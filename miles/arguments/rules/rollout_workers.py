"""Check that several processes can generate: ``--num-rollout-workers``."""

from __future__ import annotations

from miles.arguments.settings import Settings
from miles.arguments.sglang.rules import can_count_engines
from miles.components import ENGINES, engine_spec, names_with
from miles.flags import Errors

NAME = "num_rollout_workers"


def check_rollout_workers(settings: Settings, errors: Errors) -> None:
    """Check that the engine has something to share, and that every process gets a share of every limit."""
    rollout, sglang = settings.rollout, settings.sglang
    errors.at_least(rollout, 1, NAME)
    workers = rollout.num_rollout_workers
    if workers <= 1:
        return
    if not engine_spec(rollout.rollout_engine).shares_servers:
        rule = f"the {rollout.rollout_engine} engine runs inside the rollout process, so no other process can reach it"
        errors.refuse(NAME, workers, rule, f"use --rollout-engine {names_with(ENGINES, 'shares_servers')}, or give 1")
        return
    if not settings.generates:
        errors.refuse_ignored(rollout, [NAME], "by a run that generates nothing", "generate samples")
        return
    if rollout.agent_command is not None and 1 <= rollout.agent_concurrency < workers:
        rule = f"leaves some of them without a program: --agent-concurrency {rollout.agent_concurrency} is for all"
        errors.refuse(NAME, workers, rule, f"give --agent-concurrency {workers} or more, or fewer workers")
    if can_count_engines(errors) and errors.none_about("sglang_server_concurrency", "rollout_external"):
        requests = sglang.sglang_server_concurrency * (settings.num_engines + len(sglang.external_addresses))
        if 0 < requests < workers:
            rule = f"leaves some of them without a request: all servers together take {requests} at a time"
            errors.refuse(NAME, workers, rule, f"give at most {requests}, or a larger --sglang-server-concurrency")
