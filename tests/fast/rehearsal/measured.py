"""Run layouts on real ranks and measure what they allocate: ``measured.py FOLDER LAYOUT...``.

FOLDER/measured NAME RANK.json has, by phase, the peak of bytes beyond those held between steps, from torch's profiler,
and the load of the rank's experts. Random routers prefer some experts, and the rehearsal gets the measured share.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from forked_ranks import run_on_ranks
from rehearsed_layouts import FSDP, MEGATRON
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from miles.arguments.validate import validate
from miles.objective.chosen import build_objective
from miles.rehearsal.assumptions import step_of_one_rank
from miles.rehearsal.trace import largest_alone
from miles.training.backend import build_backend
from miles.training.trainer import critic_role, policy_role


def peak(prof: profile) -> int:
    """Return the largest sum of allocations less releases."""
    found, now = 0, 0
    for start, size in sorted(_allocations(prof.profiler.kineto_results.experimental_event_tree())):
        now += size
        found = max(found, now)
        del start
    return found


def _allocations(events: Any) -> list[tuple[int, int]]:
    found = []
    for event in events:
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
        found += _allocations(event.children)
    return found


@contextmanager
def chosen_experts(backend: str) -> Iterator[list[torch.Tensor]]:
    """Collect how many tokens of this rank chose each expert, layer by layer."""
    found: list[torch.Tensor] = []
    if backend != "megatron":
        yield found
        return
    from miles.training.megatron.moe.router import BalancedRouter

    routing = BalancedRouter.routing

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        probabilities, chosen = routing(self, *given, **named)
        found.append(chosen.sum(0).float())
        return probabilities, chosen

    BalancedRouter.routing = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        BalancedRouter.routing = routing  # type: ignore[method-assign]


def load_of_rank(chosen: list[torch.Tensor], rank: int, ranks: int) -> float:
    """Return the tokens of this rank's experts relative to the average; the ranks are one expert-parallel group."""
    if not chosen or ranks == 1:
        return 1.0
    of_experts = torch.stack(chosen).sum(0)
    torch.distributed.all_reduce(of_experts)
    return float(of_experts.chunk(ranks)[rank].sum() * ranks / of_experts.sum())


def measure(rank: int, name: str, folder: Path) -> None:
    """Take two optimizer steps, the first to allocate the optimizer's state, and measure the second."""
    settings = validate((FSDP | MEGATRON)[name].settings(folder)).settings
    backend = build_backend(settings, torch.device("cpu"), 10)
    shard = step_of_one_rank(settings)
    stages = settings.megatron.pipeline_model_parallel_size
    stage = rank * stages // settings.cluster.world_size
    times = stages + 1 if stages > 1 else 2  # all stages run as many; the first holds most
    times = min(times, len(shard.micro_batches))
    roles = [policy_role(backend.policy, build_objective(settings.loss))]
    if backend.critic is not None:
        roles.append(critic_role(backend.critic, settings.loss))
    for role in roles:
        role.model.forward_backward(largest_alone(shard, times), role.loss_function)
        role.optimizer.step()
    found: dict[str, Any] = {"stage": stage, "micro_batches": times}
    flops = FlopCounterMode(display=False)
    activities = [ProfilerActivity.CPU]
    with (
        chosen_experts(settings.training.train_backend) as chosen,
        profile(activities=activities, profile_memory=True, record_shapes=False) as passes,
    ):
        for role in roles[:1]:
            role.model.forward_backward(largest_alone(shard, times), role.loss_function)
    found["forward and backward"] = peak(passes)
    found["load"] = load_of_rank(chosen, rank, settings.megatron.expert_model_parallel_size)
    roles[0].optimizer.step()
    with flops:
        roles[0].model.forward_backward(largest_alone(shard, times), roles[0].loss_function)
    found["flops"] = flops.get_total_flops()
    (folder / f"measured {name} {rank}.json").write_text(json.dumps(found))


def main(folder: Path, names: list[str]) -> None:
    """Measure, and write which layouts failed to results.json."""
    failed: dict[str, str] = {}
    for name in names:
        layout = (FSDP | MEGATRON)[name]
        checks = {"measure": lambda rank, name=name: measure(rank, name, folder)}
        failed[name] = run_on_ranks(folder, name, list(range(layout.ranks)), checks)["measure"]
    (folder / "results.json").write_text(json.dumps(failed))


if __name__ == "__main__":
    if any(name in MEGATRON for name in sys.argv[2:]):
        from miles.training.megatron.cpu_support import support_cpu

        support_cpu()
    main(Path(sys.argv[1]), sys.argv[2:])
