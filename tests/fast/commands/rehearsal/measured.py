"""Run layouts on real ranks and measure what they hold, allocate, compute and send: ``measured.py FOLDER LAYOUT...``.

FOLDER/measured NAME RANK.json has what ``Measured`` describes, for one rank. Random routers prefer some experts, and
the rehearsal gets the measured share.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import run_on_ranks
from rehearsed_layouts import LAYOUTS
from torch._C._profiler import _EventType
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from miles.commands.rehearsal.trace import largest_alone, score_alone, step_of_one_rank
from miles.config.settings import Settings
from miles.config.validate import validate
from miles.objective.chosen import build_objective
from miles.training import packed_attention
from miles.training.backend import build_backend
from miles.training.trainer import Role, critic_role, policy_role

SCORE, PASSES, OPTIMIZER = "score", "passes", "optimizer"
DEADLINE = timedelta(minutes=30)  # of one layout; bf16 products are slow on a processor without instructions for them
COLLECTIVES = {  # methods of a process group, and the rehearsal's names for them
    "allreduce": "allreduce",
    "allreduce_coalesced": "allreduce",
    "allgather": "allgather",
    "all_gather_single": "allgather",
    "_allgather_base": "allgather",  # the name in earlier versions of torch
    "all_gather_single_coalesced": "allgather",
    "allgather_into_tensor_coalesced": "allgather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "alltoall",
    "alltoall_base": "alltoall",
    "broadcast": "broadcast",
    "send": "send",
}


@dataclass(frozen=True)
class Measured:
    """What one rank of a layout did.

    Attributes:
        micro_batches: All alike, in each of the passes.
        held: Bytes of all tensors between two steps.
        peaks: Bytes beyond these at the peak of a part of the step, as the allocation events of torch's
            profiler tell.
        flops: Of the same parts, by torch's counter.
        sent: Bytes by the collective's name and the number of its ranks, of the same parts.
        load: Of the rank's experts, relative to the average.
    """

    micro_batches: int
    held: int
    peaks: dict[str, int]
    flops: dict[str, int]
    sent: dict[str, dict[str, int]]
    load: float


def count_every_allocation() -> None:
    """Let torch's CPU allocator count what any thread allocates and releases, from now on.

    The profiler notes the changes in its threads, and with each of them the bytes that are allocated then. Without
    this, these bytes leave out what another thread releases: gloo's threads hold the tensors of a collective a little
    longer than the rank that waits for it, and often are the last to do so. torch has no function that sets this flag.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def peaks(prof: profile) -> dict[str, int]:
    """Return the most bytes that were allocated in each part, beyond those at the start of the first."""
    counts: list[tuple[int, int]] = []
    parts: dict[str, list[tuple[int, int]]] = {}
    first: tuple[int, int] | None = None
    for event in _events(prof.profiler.kineto_results.experimental_event_tree()):
        if event.tag == _EventType.Allocation:
            allocated = event.extra_fields.total_allocated
            counts.append((event.start_time_ns, allocated))
            before = event.start_time_ns, allocated - event.extra_fields.alloc_size
            first = before if first is None else min(first, before)
        elif event.name in (SCORE, PASSES, OPTIMIZER):
            parts.setdefault(event.name, []).append((event.start_time_ns, event.end_time_ns))
    assert first is not None, "a step allocates something"
    maxima: dict[str, int] = dict.fromkeys(parts, 0)
    for at, allocated in counts:
        for part, times in parts.items():
            if any(start <= at <= end for start, end in times):
                maxima[part] = max(maxima[part], allocated - first[1])
    return maxima


def _events(tree: Any) -> Iterator[Any]:
    for event in tree:
        yield event
        yield from _events(event.children)


def tensor_bytes() -> int:
    """Return the bytes of all tensors of this process, each storage once."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and not isinstance(item, DTensor):
            storages[item.untyped_storage()._cdata] = item.untyped_storage().nbytes()
    return sum(storages.values())


def wait_for_gloo() -> None:
    """Wait until gloo's threads have dropped the tensors of all collectives, which can be after the ranks continue.

    Each group has one thread, which drops the tensors of one collective before it takes the next.
    """
    for group in dist.distributed_c10d._world.pg_map:
        dist.barrier(group)


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Count the bytes of the largest tensors that this rank gives to each method of its process groups."""
    sent_bytes: Counter[str] = Counter()
    originals = {name: dist.ProcessGroup.__dict__[name] for name in COLLECTIVES if hasattr(dist.ProcessGroup, name)}

    def counting(name: str) -> Any:
        def counted(group: Any, *arguments: Any, **named: Any) -> Any:
            if group.size() > 1:
                sent_bytes[f"{COLLECTIVES[name]} of {group.size()}"] += max(map(_bytes, arguments))
            return originals[name].__get__(group)(*arguments, **named)

        return counted

    for name in originals:
        setattr(dist.ProcessGroup, name, counting(name))
    try:
        yield sent_bytes
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


@contextmanager
def plain_masks() -> Iterator[None]:
    """Give attention masks as plain tensors: torch's ``CausalBias`` cannot be made while operations are observed."""

    def lower_right(queries: int, keys: int) -> torch.Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    original = packed_attention.causal_lower_right
    packed_attention.causal_lower_right = lower_right  # type: ignore[assignment]
    try:
        yield
    finally:
        packed_attention.causal_lower_right = original


def grouped_product_flops(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *_: Any, **__: Any) -> int:
    """Count the products of a grouped product one by one. torch's counter does not know it, and counts nothing."""
    ends = offs.tolist()
    lengths = [end - start for start, end in pairwise([0, *ends])]
    if a.ndim == 2 and b.ndim == 3:  # rows of ``a`` are divided
        return sum(2 * rows * a.shape[1] * b.shape[2] for rows in lengths)
    assert a.ndim == b.ndim == 2, "the gradient of the matrices: the axis of the sum is divided"
    return sum(2 * a.shape[0] * summed * b.shape[1] for summed in lengths)


grouped_product_flops._get_raw = True  # type: ignore[attr-defined]  # torch's counter gives tensors, not shapes


def _bytes(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.numel() * argument.element_size()
    return sum(map(_bytes, argument)) if isinstance(argument, list) else 0


@contextmanager
def chosen_experts(backend: str) -> Iterator[list[torch.Tensor]]:
    """Collect how many tokens of this rank chose each expert, layer by layer."""
    counts: list[torch.Tensor] = []
    if backend != "megatron":
        yield counts
        return
    from miles.training.megatron.moe import BalancedRouter

    routing = BalancedRouter.routing

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        probabilities, chosen = routing(self, *arguments, **named)
        counts.append(chosen.sum(0).float())
        return probabilities, chosen

    BalancedRouter.routing = counted  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        BalancedRouter.routing = routing  # type: ignore[method-assign]


def load_of_rank(chosen: list[torch.Tensor], sizes: Any) -> float:
    """Return the tokens of this rank's experts relative to the average of its expert-parallel group."""
    ranks = sizes.expert_model_parallel_size
    if not chosen or ranks == 1:
        return 1.0
    from megatron.core import parallel_state

    group = parallel_state.get_expert_model_parallel_group()
    of_experts = torch.stack(chosen).sum(0)
    dist.all_reduce(of_experts, group=group)
    return float(of_experts.chunk(ranks)[group.rank()].sum() * ranks / of_experts.sum())


class Run:
    """One rank of a layout."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.before = tensor_bytes()
        self.backend = build_backend(settings, torch.device("cpu"), 10)
        objective = build_objective(settings.loss)
        self.roles: list[Role[Any]] = [policy_role(self.backend.policy, objective)]
        if self.backend.critic is not None:
            self.roles.append(critic_role(self.backend.critic, settings.loss))
        self.shard = step_of_one_rank(settings)
        stages = settings.megatron.pipeline_model_parallel_size
        times = stages + 1 if stages > 1 else 2  # all stages run as many; the first holds most
        if settings.megatron.num_layers_per_virtual_pipeline_stage is not None:
            times = 2 * stages
        self.times = min(times, len(self.shard.micro_batches))

    def measure(self) -> Measured:
        """Take a step, which allocates the optimizer's state, and measure the next ones."""
        self.step(self.times)
        held = tensor_bytes() - self.before
        activities = [ProfilerActivity.CPU]
        with (
            chosen_experts(self.settings.training.train_backend) as chosen,
            profile(activities=activities, profile_memory=True) as allocations,
        ):
            self.step(self.times)
        load = load_of_rank(chosen, self.settings.megatron)
        flops: dict[str, int] = {}
        sent: dict[str, dict[str, int]] = {}

        @contextmanager
        def counted(part: str) -> Iterator[None]:
            counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_product_flops})
            with counted_collectives() as collectives, plain_masks(), counter:
                yield
            flops[part] = flops.get(part, 0) + counter.get_total_flops()
            sent[part] = dict(Counter(sent.get(part, {})) + collectives)

        self.step(self.times, counted)
        return Measured(self.times, held, peaks(allocations), flops, sent, load)

    def step(self, times: int, part: Any = record_function) -> None:
        """Score and train on so many micro-batches, each part of it in a context that ``part`` makes."""
        shard = largest_alone(self.shard, times)
        with part(SCORE):
            score_alone(self.settings, self.backend, shard)
        for role in self.roles:
            with part(PASSES):
                role.model.forward_backward(shard, role.loss_function)
            gc.collect()  # objects in a reference cycle are otherwise freed at an arbitrary time
            wait_for_gloo()
            with part(OPTIMIZER):
                role.optimizer.step()
            gc.collect()


def measure(name: str, folder: Path, rank: int) -> None:
    """Write what this rank of the layout did."""
    layout = LAYOUTS[name]
    run = Run(validate(layout.settings(folder)).settings)
    (folder / f"measured {name} {rank}.json").write_text(json.dumps(asdict(run.measure())))
    if layout.backend == "megatron":
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()


def main(folder: Path, names: list[str]) -> None:
    """Measure each layout with new processes, and write what failed to results.json."""
    failed: dict[str, str] = {}
    for name in names:
        ranks = list(range(LAYOUTS[name].ranks))
        checks = {name: partial(measure, name, folder)}
        failed |= run_on_ranks(folder, f"ranks of {name}", ranks, checks, deadline=DEADLINE, workers=1)
    (folder / "results.json").write_text(json.dumps(failed))


if __name__ == "__main__":
    count_every_allocation()
    if any(LAYOUTS[name].backend == "megatron" for name in sys.argv[2:]):
        from miles.training.megatron.cpu_support import support_cpu

        support_cpu()
    main(Path(sys.argv[1]), sys.argv[2:])
