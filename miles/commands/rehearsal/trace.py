"""Run one rank's iteration under fake tensors and a fake process group, and count it.

The backend, the trainer's roles and the objective are those of a run. Only the largest micro-batches run, and their
work is multiplied.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from miles.commands.rehearsal.assumptions import step_of_one_rank
from miles.commands.rehearsal.equal_layers import UnequalLayers, leave_out_equal
from miles.commands.rehearsal.kernels import fused_attention
from miles.commands.rehearsal.meter import Meter
from miles.commands.rehearsal.record import Kind, Phase, Record, Tally, Usage
from miles.config.settings import Settings
from miles.objective.chosen import build_objective
from miles.training.backend import TrainBackend
from miles.training.rehearsed import LeaveOut, RehearsedBackend, build_rehearsed
from miles.training.scoring import needs_of
from miles.training.trainer import Role, critic_role, policy_role
from miles.types.train_batch import MicroBatchPlan, TrainShard

STEPS = 1_000_000  # of the run; only the learning rate depends on them


@dataclass(frozen=True)
class RankTrace:
    """What one rank holds and does in an optimizer step.

    Attributes:
        rank: Its global rank.
        weight_bytes: Of the models on this rank, without gradients and optimizer.
        resident: Bytes by kind that it holds between two steps.
        peaks: Bytes by kind at the peak of each phase.
        tallies: Operations and collectives of one optimizer step, by phase; of the score phase, all of one step's.
        micro_batches: Of a step.
        tokens: Of the largest micro-batch, on this rank.
        step_tokens: Of all micro-batches of a step, on this rank. A prompt that answers share is there once.
    """

    rank: int
    weight_bytes: int
    resident: Usage
    peaks: dict[Phase, Usage]
    tallies: dict[Phase, Tally]
    micro_batches: int
    tokens: int
    step_tokens: int


@contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Be ``rank`` of a process group whose other ranks do not exist."""
    gather: Any = dist.all_gather_object
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    dist.all_gather_object = _equal_objects  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_gather_object = gather
        dist.destroy_process_group()


def _equal_objects(found: list[Any], mine: Any, *_: Any, **__: Any) -> None:
    """Gather as if every rank had the same: the bytes of an object are values, which fake tensors do not have."""
    found[:] = [mine] * len(found)


@contextmanager
def conversions_in_place() -> Iterator[None]:
    """Let a module of fake parameters be moved to the device and dtype that it has already.

    PyTorch swaps fake parameters for their results, even if these are the same, and fails.
    """
    original = torch.nn.Module._apply

    def apply(module: torch.nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
        for child in module.children() if recurse else ():
            apply(child, function)
        for parameter in module._parameters.values():
            if parameter is not None:
                like = function(parameter.detach())
                assert (like.dtype, like.device) == (parameter.dtype, parameter.device), "fake weights stay as built"
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = original  # type: ignore[method-assign]


@contextmanager
def no_collections() -> Iterator[None]:
    """Let Python look for circles of references only when it is asked to, and only among objects made inside.

    It would look through all modules again and again, and release tensors of a circle at an arbitrary time.
    """
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.enable()
        gc.unfreeze()


def trace_rank(
    settings: Settings, rank: int, imbalance: float = 1.0, on_gpu: bool = True, every_layer: bool = False
) -> RankTrace:
    """Trace one rank of ``settings``, which are valid.

    Args:
        settings: All sections.
        rank: The trainer rank.
        imbalance: Load of its experts, relative to the average.
        on_gpu: Whether attention and allocations are those of a GPU, or of this host.
        every_layer: Whether each of a row of equal layers runs, which takes longer and gives the same.

    Raises:
        ValueError: The model or a flag cannot be rehearsed.
    """
    shard = step_of_one_rank(settings)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    meter = Meter(fake, vocabulary=0, on_gpu=on_gpu)
    leave_out: LeaveOut = (lambda _: ()) if every_layer else partial(leave_out_equal, meter.record)
    building = build_rehearsed(settings, STEPS, leave_out, imbalance)  # imports the backend, whose modules hold tensors
    try:
        with ExitStack() as stack:
            stack.enter_context(no_collections())
            stack.enter_context(fake_ranks(rank, settings.cluster.world_size))
            stack.enter_context(fused_attention() if on_gpu else nullcontext())
            stack.enter_context(meter.watching())
            stack.enter_context(conversions_in_place())
            stack.enter_context(disable_fake_tensor_cache(fake))  # the meter has one
            stack.enter_context(fake)
            stack.enter_context(meter)
            backend = stack.enter_context(building)
            meter.vocabulary = backend.vocabulary
            backend.reducing = lambda: meter.during(Phase.REDUCE)
            return _Run(settings, rank, backend, meter, shard).trace()
    except UnequalLayers:
        return trace_rank(settings, rank, imbalance, on_gpu, every_layer=True)


class _Run:
    """One trace."""

    def __init__(
        self, settings: Settings, rank: int, backend: RehearsedBackend, meter: Meter, shard: TrainShard
    ) -> None:
        self.settings, self.rank, self.backend, self.meter = settings, rank, backend, meter
        self.record: Record = meter.record
        plans = shard.micro_batches
        traced = backend.traced_micro_batches(len(plans))
        self.shard = largest_alone(shard, traced)
        largest = self.shard.micro_batches[0]
        self.factor = sum(_tokens(shard, plan) for plan in plans) / (_tokens(shard, largest) * traced)
        self.count = len(plans)
        self.waiting = max(0, backend.micro_batches_in_flight(len(plans)) - traced)  # of those that are not traced
        self.kept = 0  # bytes of a micro-batch between its passes
        self.tokens = _tokens(shard, largest) // largest.context_parallel_size
        self.step_tokens = sum(_tokens(shard, plan) // plan.context_parallel_size for plan in plans)

    def trace(self) -> RankTrace:
        """Run, and return what was counted."""
        meter, record, objective = self.meter, self.record, build_objective(self.settings.loss)
        meter.label(self.backend.weights(), Kind.WEIGHTS)
        roles: list[Role[Any]] = []
        if self.settings.loss.type.trains_policy:
            roles.append(policy_role(self.backend.policy, objective))
        if self.backend.critic is not None:
            roles.append(critic_role(self.backend.critic, self.settings.loss))
        self._allocate_states(roles)
        gc.collect()  # what is in a circle of references lives on until then, at an arbitrary time
        record.forget(Phase)  # the work of building: it is done once
        steady = record.mark()
        self.backend.expect(self.shard)
        with meter.during(Phase.SCORE):
            score_alone(self.settings, self.backend, self.shard)
        self._release_copies()
        for role in roles:
            self._step(role)
        gc.collect()
        before, resident = record.held(steady), record.held(record.mark())
        steady_peaks = record.peaks(since=steady)
        if Phase.SCORE not in record.tallies:
            steady_peaks.pop(Phase.SCORE, None)
        left = sum(resident.values()) - sum(before.values())  # a pipeline's last messages, which the next step finds
        further = {Phase.SCORE: left, Phase.TRAIN: left + self.waiting * self.kept, Phase.REDUCE: left}
        for phase, size in further.items():
            if size and phase in steady_peaks:
                usage = steady_peaks[phase]
                usage[Kind.ACTIVATIONS] = usage.get(Kind.ACTIVATIONS, 0) + size
        per_micro_batch = (Phase.SCORE, Phase.TRAIN)
        tallies = {p: t.scaled(self.factor if p in per_micro_batch else 1.0) for p, t in record.tallies.items()}
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self.backend.weights()}
        size = sum(storages.values())
        building = {Kind.WEIGHTS: size} if self.backend.reads_on_host else record.peaks()[Phase.BUILD]
        peaks = {Phase.BUILD: building, **steady_peaks}
        return RankTrace(self.rank, size, resident, peaks, tallies, self.count, self.tokens, self.step_tokens)

    def _allocate_states(self, roles: Sequence[Role[Any]]) -> None:
        for role in roles:
            with self.meter.during(Phase.OPTIMIZE):
                self.backend.allocate_states(role.model)
        self.meter.label(self.backend.optimizer_states(), Kind.OPTIMIZER)

    def _step(self, role: Role[Any]) -> None:
        self.backend.expect(self.shard)
        started: list[int] = []
        self.backend.starting = lambda: started.append(self.record.mark())
        with self.meter.during(Phase.TRAIN):
            if self.count > 1:
                self.backend.hold_gradients(role.model)
                self.meter.label(self.backend.gradients(), Kind.GRADIENTS)
            role.model.forward_backward(self.shard, role.loss_function)
            self.meter.label(self.backend.gradients(), Kind.GRADIENTS)
            with self.meter.unseen():  # of layers that did not run; the record's copies have them already
                self.backend.hold_gradients(role.model)
            self.meter.held_by_copies(self.backend.gradients())
        if len(started) > 1:
            kept = self.record.held(started[1]).get(Kind.ACTIVATIONS, 0)
            self.kept = max(self.kept, kept - self.record.held(started[0]).get(Kind.ACTIVATIONS, 0))
        with self.meter.during(Phase.OPTIMIZE):
            role.optimizer.step()
        self._release_copies()

    def _release_copies(self) -> None:
        """Release what copies of layers hold, and the layers do not: the gradients of a step."""
        if self.record.release_copies().keys() - {Kind.GRADIENTS}:
            raise UnequalLayers("copies do not release in a backward pass what they keep for it")


def score_alone(settings: Settings, backend: TrainBackend, shard: TrainShard) -> None:
    """Run the passes in which an iteration scores the micro-batches of ``shard`` before its last step."""
    loss = settings.loss
    needs = needs_of(build_objective(loss), settings.steps_per_iteration - 1, loss.type.trains_policy)
    models = []
    if needs.ref_log_probs and backend.reference is not None:
        models.append(backend.reference)
    if needs.teacher_log_probs and backend.teacher is not None:
        models.append(backend.teacher)
    if needs.old_log_probs and not loss.use_rollout_logprobs:
        models.append(backend.policy)
    if needs.sum_squared_probs:
        models.append(backend.policy)
    for model in models:
        model.forward(shard, shard.micro_batches, lambda _, score: score(with_entropy=False).log_probs)
    if needs.values and backend.critic is not None:
        backend.critic.forward(shard, shard.micro_batches, lambda _, score: score())


def largest_alone(shard: TrainShard, times: int) -> TrainShard:
    """Return the shard with nothing but its largest micro-batch, so many times, and unwatched."""
    largest = max(shard.micro_batches, key=lambda plan: _tokens(shard, plan))
    return replace(shard, micro_batches=[largest] * times, score_only=(), expected_loss_mass=None)


def _tokens(shard: TrainShard, plan: MicroBatchPlan) -> int:
    """Count the tokens of a micro-batch on all ranks that share it, as they are laid out."""
    batch = shard.batch
    totals = [len(batch.tokens[i]) for i in plan.samples]
    if plan.padded:
        return max(1, len(totals) * max(totals, default=0))
    if plan.context_parallel_size > 1:
        return max(1, sum(totals))
    prompts = {batch.tokens[i][: totals[n] - batch.response_lengths[i]].tobytes() for n, i in enumerate(plan.samples)}
    return max(1, sum(batch.response_lengths[i] for i in plan.samples) + sum(len(prompt) // 8 for prompt in prompts))
