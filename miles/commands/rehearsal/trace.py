"""Run one rank's iteration under fake tensors and a fake process group, and count it.

The backend, the trainer's roles and the objective are the ones of a run. Only the largest micro-batches run, and their
work is multiplied.
"""

from __future__ import annotations

import gc
import io
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from miles.base.attributes import set_within
from miles.base.processes import pool_of
from miles.batch.convert import convert
from miles.batch.schedule import schedule_step
from miles.commands.rehearsal.meter import (
    MemoryKind,
    Meter,
    Moment,
    OperationCounts,
    Phase,
    Record,
    Stretch,
    Usage,
    fused_attention,
)
from miles.config.explain import explain_layout
from miles.config.settings import Settings
from miles.objective.aggregation import MODES, AggregationFlags, StepDenominators, step_denominators
from miles.objective.canary import mass_is_known
from miles.objective.chosen import build_objective, objective_formula
from miles.objective.settings import LossArguments
from miles.training.backend import LeaveOut, RehearsedBackend, TrainBackend, build_rehearsed
from miles.training.scoring import needs_of
from miles.training.trainer import Role, critic_role, policy_role
from miles.types.dims import ParallelDims
from miles.types.images import ImageTensors, PromptImages
from miles.types.sample import Prompt, PromptGroup, Sample
from miles.types.train_batch import MicroBatchPlan, TrainBatch, TrainShard

# The step that is rehearsed: every response has the assumed length, and micro-batches are cut as in a run.


PROMPT = 512  # tokens, if neither flag states how many
IMAGE_SIDE = 512  # pixels, if --image-max-pixels does not bound them


def assumed_image(settings: Settings) -> PromptImages | None:
    """Return the image of every prompt, a square; None for a run without images."""
    if settings.data.multimodal_keys is None:
        return None
    return _image(str(settings.model.hf_checkpoint), math.isqrt(settings.data.image_max_pixels or IMAGE_SIDE**2))


@lru_cache(maxsize=1)
def _image(model: str, side: int) -> PromptImages:
    from PIL import Image

    from miles.models.images import expansions, load_processor

    processor = load_processor(model)
    sizes = ((side, side),)
    file = io.BytesIO()
    Image.new("RGB", sizes[0]).save(file, "PNG")
    counts = (expansions(model, sizes)[0].count(processor.image_token),)
    return PromptImages((file.getvalue(),), sizes, counts, (0,), processor.image_token_id, model)


def prompt_length(settings: Settings) -> int:
    """Return the assumed tokens of a prompt, with its image.

    Raises:
        ValueError: Its image has no room in it.
    """
    image, length = assumed_image(settings), _prompt_length(settings)
    if image is None or length > image.counts[0]:
        return length
    prompt_len, longest = settings.rehearsal.rehearse_prompt_len, settings.data.rollout_max_prompt_len
    if prompt_len is None and longest is None and settings.rollout.rollout_max_context_len is None:
        return image.counts[0] + PROMPT
    raise ValueError(
        f"--rehearse: an image of {image.sizes[0][0]} x {image.sizes[0][1]} pixels takes {image.counts[0]} tokens, and "
        f"a prompt is assumed to have {length}; give more with --rehearse-prompt-len, or fewer --image-max-pixels"
    )


def _prompt_length(settings: Settings) -> int:
    """Without a flag, a short context is mostly left to the response."""
    rehearsal, longest = settings.rehearsal, settings.data.rollout_max_prompt_len
    if rehearsal.rehearse_prompt_len is not None:
        return rehearsal.rehearse_prompt_len
    context = settings.rollout.rollout_max_context_len
    if context is not None and rehearsal.rehearse_response_len is not None:
        return min(PROMPT, longest or PROMPT, context - rehearsal.rehearse_response_len)
    return min(PROMPT, longest or (PROMPT if context is None else max(1, context // 4)))


def response_length(settings: Settings) -> int:
    """Return the assumed tokens of a response: the longest that the limits of a response and of a sequence allow."""
    length = settings.rehearsal.rehearse_response_len or settings.rollout.rollout_max_response_len
    assert length is not None, "check_rehearsal() requires one of the two"
    context = settings.rollout.rollout_max_context_len
    return length if context is None else min(length, context - prompt_length(settings))


def step_of_one_rank(settings: Settings) -> TrainShard:
    """Schedule what one replica trains on in a step, and return the shard of its first rank.

    Replicas are alike, since all samples are equally long. Under dynamic context parallelism the whole step is
    scheduled, because its micro-batches use all ranks.
    """
    dims, per_prompt = settings.dims, settings.rollout.n_samples_per_prompt
    whole = settings.parallel.dynamic_context_parallel
    replicas = 1 if whole else dims.replicas
    samples = max(1, -(-settings.global_batch_size // replicas))
    lengths = prompt_length(settings), response_length(settings)
    batch = _batch(samples, per_prompt, *lengths, settings.loss, assumed_image(settings))
    ranks = dims.token_ranks if whole else dims.context_parallel_size
    share = not (settings.megatron.mtp_heads or settings.rollout.use_rollout_routing_replay)  # as ShardBuilder does
    shard = schedule_step(batch, ranks, settings.training, settings.parallel, share_prompts=share)[0]
    columns = [np.zeros(length, np.float32) for length in batch.select(range(len(shard.batch))).response_lengths]
    is_postprocessed = settings.loss.rollout_data_postprocess_path is not None  # it may change both
    has_old = settings.steps_per_iteration > 1 or is_postprocessed or build_objective(settings.loss).needs.old_log_probs
    scored = replace(
        shard.batch,
        old_log_probs=columns if has_old or settings.loss.use_rollout_logprobs else None,
        tis_mean=1.0 if settings.loss.tis_batch_normalize else None,
        ref_log_probs=columns if settings.loss.needs_reference else None,
        values=columns if settings.loss.has_critic else None,
        returns=columns if settings.loss.has_critic else None,
        advantages=columns if build_objective(settings.loss).estimates_by_token or is_postprocessed else None,
        selected=columns if build_objective(settings.loss).selects_tokens else None,
        top_entropy=columns if build_objective(settings.loss).ranks_entropies else None,
    )
    return replace(shard, batch=scored)


@lru_cache(maxsize=2)  # most changes that are tried have the same samples
def _batch(
    samples: int,
    per_prompt: int,
    prompt_tokens: int,
    response_tokens: int,
    loss_flags: LossArguments,
    image: PromptImages | None = None,
) -> TrainBatch:
    """Convert samples to the batch that a replica trains on.

    The converter gets responses of one token, and its columns are made longer afterwards: numbers that are all alike
    need no lists.
    """
    default = AggregationFlags()  # the sample mean: the groups of a replica need not be whole
    loss = replace(loss_flags, loss_aggregation=default.loss_aggregation, loss_aggregation_divisor=None)
    (batch,) = convert(_groups(samples, per_prompt), loss=loss, global_batch_size=samples)
    ones, zeros = np.ones(response_tokens, np.float32), np.zeros(response_tokens, np.float32)
    tokens = np.zeros((samples, prompt_tokens + response_tokens), np.int64)
    for i, row in enumerate(tokens):
        _write_digits(i // per_prompt, row[:prompt_tokens])
        _write_digits(i % per_prompt, row[prompt_tokens:])
    images: list[ImageTensors | None] | None = None
    if image is not None:
        from miles.models.images import tensors_of

        start = prompt_tokens - image.counts[0]
        tokens[:, start:prompt_tokens] = image.placeholder_id
        pixels = tensors_of(image)
        of_prompts = [replace(pixels, starts=(start,)) for _ in range(0, samples, per_prompt)]  # each encoded by itself
        images = [of_prompts[i // per_prompt] for i in range(samples)]
    return replace(
        batch,
        images=images,
        tokens=[*tokens],
        response_lengths=[response_tokens] * samples,
        loss_masks=[ones] * samples,
        rollout_log_probs=[zeros] * samples,
        teacher_log_probs=None if batch.teacher_log_probs is None else [zeros] * samples,
        sample_denoms=[float(response_tokens)] * samples,
        trajectory_token_counts=[float(response_tokens)] * samples,
        num_loss_tokens=samples * response_tokens,
    )


def _groups(samples: int, per_prompt: int) -> list[PromptGroup]:
    """Return groups of samples with one token each."""
    groups = []
    for index, first in enumerate(range(0, samples, per_prompt)):
        prompt = Prompt("", (0,))
        answers = [
            Sample(prompt, index, i, [0], "", [1], [0.0], teacher_log_probs=[0.0], reward=float(i % 2))
            for i in range(first, min(first + per_prompt, samples))
        ]
        groups.append(PromptGroup(index, prompt, answers, baseline_reward=0.5))
    return groups


def _write_digits(number: int, row: np.ndarray) -> None:
    """Write token ids that any vocabulary has: the hexadecimal digits of ``number``, the last first.

    So prompts, and the responses to one, share at most their first few tokens.
    """
    digits = [int(digit, 16) for digit in reversed(f"{number:x}")][: len(row)]
    row[: len(digits)] = digits


# Run a few of a row of equal layers, and count the others as copies of these.
#
# The first three and the last two layers of the row run. What was recorded between the starts of the third and the next
# is copied for each layer that is left out, and so is what was recorded between the gradients that arrive there. With
# Megatron all layers exist. With FSDP those that are left out are removed before weights are sharded, and the layer
# before them holds parameters as large as theirs.
#
# Layers have to be equal in structure, and the records of the third and of the next have to be equal: the same changes
# of memory in the same order, and the same work.


# Layers that run; FSDP gathers the weights of the first two backward passes earlier than the weights of others.
FIRST = 3
LAST = 2
PLACES = frozenset({"layer_idx", "layer_number"})  # attributes that hold the index of a layer


class UnequalLayers(Exception):
    """Layers of equal structure do not do the same, so each of them must run."""


class _Mark(NamedTuple):
    """The start of a layer's forward pass, or the end of its backward pass."""

    place: int  # among the layers of the row that run
    is_backward: bool
    moment: Moment


class _Row:
    """The layers of a row that run, watched."""

    def __init__(self, layers: Sequence[nn.Module], left_out: int, record: Record) -> None:
        self._left_out, self._record = left_out, record
        self._last: _Mark | None = None
        self._neighbour: Stretch | None = None  # between the last two marks, if they are of one pass
        for place, layer in enumerate(layers):
            self._watch(layer, place)

    def _watch(self, layer: nn.Module, place: int) -> None:
        row, kind = self, type(layer)

        def called(self: nn.Module, *args: Any, **named: Any) -> Any:
            is_recomputed = torch._C._current_graph_task_id() != -1  # a backward pass is running
            if not is_recomputed:
                row._pass(place, is_backward=False)
                hidden = args[0] if args else named["hidden_states"]
                if hidden.requires_grad:
                    hidden.register_hook(lambda _: row._pass(place, is_backward=True))
            return kind.__call__(self, *args, **named)

        layer.__class__ = type(kind.__name__, (kind,), {"__call__": called})

    def _pass(self, place: int, is_backward: bool) -> None:
        """Compare and copy what was recorded since the mark before, which is the neighbour's if a pass continues."""
        last, before, record = self._last, self._neighbour, self._record
        expected = place + 1 if is_backward else place - 1
        follows = last is not None and (last.place, last.is_backward) == (expected, is_backward)
        self._neighbour = record.since(last.moment) if last is not None and follows else None
        if self._neighbour is not None:
            across = FIRST - 1 if is_backward else FIRST
            adjacent = FIRST - 1 if is_backward else FIRST + 1
            if place == adjacent and (before is None or not record.is_equal(before, self._neighbour)):
                raise UnequalLayers("neighbours in a row were recorded differently")
            if place == across:
                record.copy(self._neighbour, self._left_out)
        self._last = _Mark(place, is_backward, record.moment())


def leave_out_equal(record: Record, layers: Sequence[nn.Module]) -> list[int]:
    """Return the indices between the ends of each row of equal layers, which ``record`` copies from the ends."""
    left_out: list[int] = []
    for row in rows(layers):
        middle = row[FIRST:-LAST]
        if middle:
            _Row([layers[place] for place in row if place not in middle], len(middle), record)
            left_out += middle
    return left_out


def rows(layers: Sequence[nn.Module]) -> Iterator[list[int]]:
    """Yield the indices of equal layers that are next to each other."""
    structures = [_structure(layer) for layer in layers]
    for _, row in groupby(range(len(layers)), key=lambda place: structures[place]):
        yield list(row)


def _structure(layer: nn.Module) -> list[Any]:
    """Return the parts of a layer, apart from its index: modules, their settings, parameters and buffers."""
    parts: list[Any] = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None) and key not in PLACES
        }
        tensors = [
            (key, tensor.shape, tensor.dtype, tensor.requires_grad)
            for tensors_by_name in (module._parameters, module._buffers)
            for key, tensor in tensors_by_name.items()
            if tensor is not None
        ]
        parts.append((name, type(module), settings, tensors))
    return parts


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
    tallies: dict[Phase, OperationCounts]
    micro_batches: int
    tokens: int
    step_tokens: int


@contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Be ``rank`` of a process group whose other ranks do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with set_within(dist, all_gather_object=_equal_objects):
            yield
    finally:
        dist.destroy_process_group()


def _equal_objects(objects: list[Any], mine: Any, *_: Any, **__: Any) -> None:
    """Gather as if every rank had the same: the bytes of an object are values, which fake tensors do not have."""
    objects[:] = [mine] * len(objects)


def conversions_in_place() -> AbstractContextManager[object]:
    """Let a module of fake parameters be moved to the device and dtype that it has already.

    PyTorch swaps fake parameters for their results, even if these are the same, and fails.
    """

    def apply(module: torch.nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
        if recurse:
            for child in module.children():
                apply(child, function)
        for parameter in module._parameters.values():
            if parameter is not None:
                like = function(parameter.detach())
                assert (like.dtype, like.device) == (parameter.dtype, parameter.device), "fake weights stay as built"
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    return set_within(torch.nn.Module, _apply=apply)


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


def trace_rank(settings: Settings, rank: int, imbalance: float = 1.0, every_layer: bool = False) -> RankTrace:
    """Trace one rank of ``settings``, which are valid.

    Args:
        settings: All sections.
        rank: The trainer rank.
        imbalance: Load of its experts, relative to the average.
        every_layer: Whether each of a row of equal layers runs, which takes longer and gives the same.

    Raises:
        ValueError: The model or a flag cannot be rehearsed.
    """
    shard = step_of_one_rank(settings)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    meter = Meter(fake, vocabulary=0)
    leave_out: LeaveOut = (lambda _: ()) if every_layer else partial(leave_out_equal, meter.record)
    building = build_rehearsed(settings, STEPS, leave_out, imbalance)  # imports the backend, whose modules hold tensors
    try:
        with ExitStack() as stack:
            stack.enter_context(no_collections())
            stack.enter_context(fake_ranks(rank, settings.cluster.world_size))
            stack.enter_context(fused_attention())
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
        return trace_rank(settings, rank, imbalance, every_layer=True)


class _Run:
    """One trace."""

    def __init__(
        self, settings: Settings, rank: int, backend: RehearsedBackend, meter: Meter, shard: TrainShard
    ) -> None:
        self.settings = settings
        self.rank = rank
        self.backend = backend
        self.meter = meter
        self.record: Record = meter.record
        plans = shard.micro_batches
        traced = backend.traced_micro_batches(len(plans))
        self.shard = largest_alone(shard, traced)
        largest = self.shard.micro_batches[0]
        self.factor = sum(_tokens(shard, plan) for plan in plans) / (_tokens(shard, largest) * traced)
        self.count = len(plans)
        self.waiting = max(0, backend.micro_batches_in_flight(len(plans)) - traced)  # of those that are not traced
        self.retained = 0  # bytes of a micro-batch between its passes
        self.tokens = _tokens(shard, largest) // largest.context_parallel_size
        self.step_tokens = sum(_tokens(shard, plan) // plan.context_parallel_size for plan in plans)

    def trace(self) -> RankTrace:
        """Run, and return what was counted."""
        meter, record = self.meter, self.record
        objective = build_objective(self.settings.loss)
        meter.label(self.backend.weights(), MemoryKind.WEIGHTS)
        roles: list[Role[Any]] = []
        if self.settings.loss.type.trains_policy:
            roles.append(policy_role(self.backend.policy, objective))
        if self.backend.critic is not None:
            roles.append(critic_role(self.backend.critic, self.settings.loss))
        for role in roles:
            with meter.during(Phase.OPTIMIZE):
                self.backend.allocate_states(role.model)
        meter.label(self.backend.optimizer_states(), MemoryKind.OPTIMIZER)
        gc.collect()  # objects in a circle of references live on until then, at an arbitrary time
        record.forget()  # the work of building: it is done once
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
        further = {Phase.SCORE: left, Phase.TRAIN: left + self.waiting * self.retained, Phase.REDUCE: left}
        for phase, size in further.items():
            if size and phase in steady_peaks:
                usage = steady_peaks[phase]
                usage[MemoryKind.ACTIVATIONS] = usage.get(MemoryKind.ACTIVATIONS, 0) + size
        per_micro_batch = (Phase.SCORE, Phase.TRAIN)
        tallies = {p: t.scaled(self.factor if p in per_micro_batch else 1.0) for p, t in record.tallies.items()}
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self.backend.weights()}
        weight_bytes = sum(storages.values())
        building = {MemoryKind.WEIGHTS: weight_bytes} if self.backend.reads_on_host else record.peaks()[Phase.BUILD]
        peaks = {Phase.BUILD: building, **steady_peaks}
        return RankTrace(self.rank, weight_bytes, resident, peaks, tallies, self.count, self.tokens, self.step_tokens)

    def _step(self, role: Role[Any]) -> None:
        self.backend.expect(self.shard)
        started: list[int] = []
        self.backend.starting = lambda: started.append(self.record.mark())
        with self.meter.during(Phase.TRAIN):
            if self.count > 1:
                self.backend.hold_gradients(role.model)
                self.meter.label(self.backend.gradients(), MemoryKind.GRADIENTS)
            role.model.forward_backward(self.shard, role.loss_function)
            self.meter.label(self.backend.gradients(), MemoryKind.GRADIENTS)
            with self.meter.unseen():  # of layers that did not run; the record's copies have them already
                self.backend.hold_gradients(role.model)
            self.meter.held_by_copies(self.backend.gradients())
        if len(started) > 1:
            first, second = (self.record.held(start).get(MemoryKind.ACTIVATIONS, 0) for start in started[:2])
            self.retained = max(self.retained, second - first)
        with self.meter.during(Phase.OPTIMIZE):
            role.optimizer.step()
        self._release_copies()

    def _release_copies(self) -> None:
        """Release what copies of layers hold, and the layers do not: the gradients of a step."""
        if self.record.release_copies().keys() - {MemoryKind.GRADIENTS}:
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
    """Return the shard with only its largest micro-batch, so many times, and unwatched."""
    largest = max(shard.micro_batches, key=lambda plan: _tokens(shard, plan))
    return replace(shard, micro_batches=[largest] * times, score_only=(), expected_loss_mass=None)


def _tokens(shard: TrainShard, plan: MicroBatchPlan) -> int:
    """Count the tokens of a micro-batch on all ranks that share it, as laid out."""
    batch = shard.batch
    totals = [len(batch.tokens[i]) for i in plan.samples]
    if plan.padded:
        return max(1, len(totals) * max(totals, default=0))
    if plan.context_parallel_size > 1:
        return max(1, sum(totals))
    prompts = {batch.tokens[i][: totals[n] - batch.response_lengths[i]].tobytes() for n, i in enumerate(plan.samples)}
    return max(1, sum(batch.response_lengths[i] for i in plan.samples) + sum(len(prompt) // 8 for prompt in prompts))


# Trace several ranks at once, each in a process on its own core.


@dataclass(frozen=True)
class Job:
    """The first rank of a pipeline stage, with the load of its experts relative to the average."""

    settings: Settings
    stage: int
    imbalance: float = 1.0


class Tracers:
    """The processes that trace, one for each core. A context: they end when it does.

    The first rank is traced in this process, which then has imported the backend and met most operations: that takes
    longer than the traces of other ranks do afterwards. Then this process is forked. With GPUs this process traces
    nothing: autograd starts threads for them, which a fork lacks.
    """

    def __init__(self) -> None:
        self._workers = len(os.sched_getaffinity(0))
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Tracers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def trace(self, jobs: Sequence[Job]) -> list[RankTrace | str]:
        """Return the trace of each job, or why it cannot be rehearsed."""
        if self._workers < 2:
            return [_trace(job) for job in jobs]
        traces_here = self._pool is None and not torch.cuda.is_available()
        first = [_trace(job) for job in jobs[:1]] if traces_here else []
        others = jobs[len(first) :]
        if others and self._pool is None:
            # A fork has none of the threads of a parallel loop.
            self._pool = pool_of(self._workers, "fork", partial(torch.set_num_threads, 1))
        return first + (list(self._pool.map(_trace, others)) if self._pool is not None else [])


def _trace(job: Job) -> RankTrace | str:
    rank = job.stage * job.settings.dims.ranks_per_stage
    try:
        return trace_rank(job.settings, rank, job.imbalance)
    except ValueError as error:
        return str(error)


# The loss contract of a rehearsed layout: what losses are divided by, which ranks share tokens, and the loss mass.


WIDTH = 118


def contract_text(settings: Settings) -> list[str]:
    """Return the lines of the report."""
    lines = objective_formula(settings.loss, settings.step_shape, settings.added_losses).splitlines()
    mass = expected_mass(settings)
    if mass is not None:
        lines.append(
            f"divided by   {MODES[settings.loss.loss_aggregation].words}, of the whole step of N = "
            f"{settings.global_batch_size}, before it is split"
        )
    lines += explain_layout(settings)[1:]
    if mass is not None:
        lines.append(f"canary       the weights of all tokens must add up to {mass:g}")
    return [row for line in lines for row in textwrap.wrap(line, WIDTH, subsequent_indent=" " * 13)]


def contract_data(settings: Settings) -> dict[str, Any]:
    """Return the same as data. Denominators and mass are None if they are not known."""
    return {
        "aggregation": settings.loss.loss_aggregation,
        "trajectories": settings.global_batch_size,
        "denominators": _denominators(settings),
        "expected_mass": expected_mass(settings),
        "ranks": _ranks(settings.dims),
    }


def expected_mass(settings: Settings) -> float | None:
    """Return the loss mass of a step without a masked token (objective/canary.py); None if it is not known."""
    step = _of_step(settings)
    return None if step is None else step.expected_loss_mass


def _of_step(settings: Settings) -> StepDenominators | None:
    """Compute the denominators of a step as a run does, for responses of the assumed length; None if it has others."""
    if not mass_is_known(settings.loss):
        return None
    count, loss = settings.global_batch_size, settings.loss
    return step_denominators(
        loss.loss_aggregation,
        token_counts=[response_length(settings)] * count,
        trajectory_ids=range(count),
        group_indices=[i // settings.rollout.n_samples_per_prompt for i in range(count)],
        divisor=loss.loss_aggregation_divisor,
        alpha=loss.loss_aggregation_alpha,
    )


def _denominators(settings: Settings) -> dict[str, Any] | None:
    """Return the numbers: a token weighs 1 / (``trajectories`` times its sample's denominator), on whichever rank."""
    step = _of_step(settings)
    if step is None:
        return None
    return {
        "of_a_sample": MODES[settings.loss.loss_aggregation].denominator,
        "of_a_sample_without_masked_tokens": step.sample_denoms[0],
        "weight_of_a_token": 1 / (step.num_trajectories * step.sample_denoms[0]),
        "trajectories": step.num_trajectories,
        "prompts": -(-step.num_trajectories // settings.rollout.n_samples_per_prompt),
        "loss_tokens": step.num_loss_tokens,
    }


def _ranks(dims: ParallelDims) -> dict[str, Any]:
    """Return groups of ranks; every rank is in one group of each kind.

    Under dynamic context parallelism each micro-batch chooses the size of the groups that share its sequences.
    """
    shared = None if dims.dynamic_context_parallel else dims.context_groups(dims.context_parallel_size)
    return {
        "same_tokens_other_weights": dims.weight_groups,
        "share_each_sequence": shared,
        "context_parallel_sizes": dims.context_sizes,
        "same_weights_other_tokens": dims.token_groups,
    }
