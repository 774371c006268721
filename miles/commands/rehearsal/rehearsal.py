"""Rehearse a run: trace one rank of each kind, add the engine, and find what would help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch

from miles.base.flags import FlagError
from miles.commands.rehearsal.meter import MemoryKind, Phase, Usage
from miles.commands.rehearsal.roofline import (
    NOTHING,
    Device,
    GenerationEstimate,
    Seconds,
    device_of,
    foresee_generation,
    seconds,
    sync_seconds,
)
from miles.commands.rehearsal.trace import Job, RankTrace, Tracers, step_of_one_rank, trace_rank
from miles.config.megatron.settings import MegatronArguments
from miles.config.settings import Settings
from miles.config.validate import validate
from miles.models.packing import reads_images
from miles.models.reading import class_of, read_config
from miles.models.registry import CONVERTED, megatron_shape

IMBALANCE = 2.0  # load of the experts of the busiest rank, relative to the average
ADVICE = 3


@dataclass(frozen=True)
class ModelSize:
    """Numbers in a model: all, and those that one token is multiplied with; its layers, and the experts of one."""

    parameters: int
    active: int
    experts: int
    layers: int


@dataclass(frozen=True)
class RankForecast:
    """A rank: its trace, and its memory with everything else on its device."""

    stage: int
    trace: RankTrace
    phases: dict[Phase, Usage]

    @property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        return total(self.phases[worst_phase(self.phases)])


@dataclass(frozen=True)
class Alternative:
    """A change of the command, and its effect."""

    change: Change
    peak: int
    step: Seconds


@dataclass(frozen=True)
class Rehearsal:
    """The predicted needs of a run.

    Attributes:
        settings: All sections.
        device: Of ranks and engines.
        memory: Bytes that a rank must fit in.
        size: The model's.
        ranks: One of each kind, by pipeline stage.
        imbalanced: The busiest rank with experts of twice the load; None if that makes no difference.
        generation: The engines.
    """

    settings: Settings
    device: Device
    memory: int
    size: ModelSize
    ranks: tuple[RankForecast, ...]
    imbalanced: RankForecast | None
    generation: GenerationEstimate

    @cached_property
    def worst(self) -> RankForecast:
        """The rank that needs most memory."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.settings.megatron.pipeline_model_parallel_size

    @property
    def chunks(self) -> int:
        """Parts of the model on each pipeline stage; 1 unless the pipeline is interleaved."""
        return self.settings.megatron.chunks(self.size.layers)

    @property
    def bubble(self) -> float:
        """The share of the passes in which a pipeline stage waits for others."""
        count = self.worst.trace.micro_batches * self.chunks
        return (self.stages - 1) / (count + self.stages - 1)

    def phase_seconds(self, phase: Phase) -> Seconds:
        """Return the time of a phase of one optimizer step, on the slowest rank, with the wait of the pipeline."""
        times = [seconds(r.trace.tallies[phase], self.device, phase) for r in self.ranks if phase in r.trace.tallies]
        if not times:
            return NOTHING
        slowest = Seconds(max(s.low for s in times), max(s.high for s in times))
        waits = phase in (Phase.SCORE, Phase.TRAIN)
        return slowest * (1 / (1 - self.bubble)) if waits else slowest

    @property
    def step(self) -> Seconds:
        """The time of an optimizer step."""
        return sum(map(self.phase_seconds, (Phase.TRAIN, Phase.REDUCE, Phase.OPTIMIZE)), NOTHING)

    @property
    def scoring(self) -> Seconds:
        """The time in which all samples of an iteration are scored; further passes over them use the same scores."""
        return self.phase_seconds(Phase.SCORE) * self.settings.steps_per_pass

    @property
    def training(self) -> Seconds:
        """The trainer's time of an iteration."""
        return self.step * self.settings.steps_per_iteration + self.scoring

    @property
    def sync(self) -> Seconds | None:
        """The time in which the engines get new weights; nothing without engines, None if it is not known."""
        engines = self.generation.engines
        return sync_seconds(self.settings, self.size.parameters, engines, self.device) if engines else NOTHING

    @property
    def balanced_tokens_per_second(self) -> tuple[float, float]:
        """The response tokens per second, of all engines together, at which generation takes as long as training."""
        tokens = self.generation.tokens
        return tokens / self.training.high, tokens / self.training.low


def rehearse_settings(settings: Settings, tracers: Tracers) -> Rehearsal:
    """Rehearse ``settings``, which are valid.

    Raises:
        ValueError: The backend refuses the model, or the model or a flag cannot be rehearsed.
    """
    device = device_of(settings.rehearsal.rehearse_device)
    # Ranks of another node are reached over the network, also if the device's own nodes would hold them all.
    device = replace(device, gpus_per_node=min(device.gpus_per_node, settings.cluster.actor_num_gpus_per_node))
    available = int((settings.rehearsal.gpu_memory or device.memory) * 2**30)
    assert settings.model.hf_checkpoint is not None
    config = read_config(settings.model.hf_checkpoint)
    size = model_size(config)
    text = config.get_text_config().to_dict() | {"num_hidden_layers": size.layers}  # some compute it from a pattern
    generation = foresee_generation(settings, text, size.parameters, size.active, device, available)
    jobs = [Job(settings, stage) for stage in _stages(settings, config.to_dict())]
    ranks = tuple(_forecasts(jobs, tracers.trace(jobs), generation))
    imbalanced = None
    if size.experts and settings.megatron.expert_model_parallel_size > 1:
        worst = max(ranks, key=lambda rank: rank.peak)
        jobs = [Job(settings, worst.stage, IMBALANCE)]
        (imbalanced,) = _forecasts(jobs, tracers.trace(jobs), generation)
    return Rehearsal(settings, device, available, size, ranks, imbalanced, generation)


@dataclass
class _Tried:
    """A change, with the ranks that have been traced under it."""

    change: Change
    settings: Settings
    missing: list[int]  # stages that have not been traced
    ranks: list[RankForecast] = field(default_factory=list)
    fails: bool = False  # the changed command cannot be rehearsed

    @property
    def peak(self) -> int:
        """Bytes that the command needs at least."""
        return max(rank.peak for rank in self.ranks)


def advise(rehearsal: Rehearsal, tracers: Tracers) -> Iterator[Alternative]:
    """Yield the changes that save most memory on the worst rank, each traced again, at most ``ADVICE``.

    First, one stage is traced per change: the stage of the worst rank if it is to be traced. The others are traced only
    for changes that may still save most.
    """
    tried: list[_Tried] = []
    for change in changes(rehearsal.settings):
        try:
            settings = change.applied(rehearsal.settings)
            stages = stages_of_change(settings)
        except (FlagError, ValueError):  # this change and another flag exclude each other
            continue
        if _leaves_worst_rank(rehearsal, settings):
            continue
        tried.append(_Tried(change, settings, sorted(stages, key=lambda stage: stage != rehearsal.worst.stage)))
    _trace_more(tried, rehearsal.generation, tracers, stages=1)
    while True:
        tried = sorted((each for each in tried if not each.fails), key=lambda each: each.peak)
        unfinished = [each for each in tried[:ADVICE] if each.missing]
        if not unfinished:
            break
        _trace_more(unfinished, rehearsal.generation, tracers)
    for each in tried[:ADVICE]:
        if each.peak < rehearsal.worst.peak:
            changed = replace(rehearsal, settings=each.settings, ranks=tuple(each.ranks), imbalanced=None)
            yield Alternative(each.change, changed.worst.peak, changed.step)


def _leaves_worst_rank(rehearsal: Rehearsal, changed: Settings) -> bool:
    """Return whether the rank that needs most memory does the same under ``changed``, so that nothing is saved.

    Its micro-batches may have one sample already, and only the last stage of a pipeline has logits.
    """
    current = rehearsal.settings
    if changed == replace(current, loss=changed.loss):
        same_but_chunks = replace(current.loss, log_probs_chunk_size=changed.loss.log_probs_chunk_size)
        return changed.loss == same_but_chunks and rehearsal.worst.stage < rehearsal.stages - 1
    if changed == replace(current, training=changed.training):
        sizes = ("max_tokens_per_gpu", "micro_batch_size")
        same_but_sizes = replace(current.training, **{name: getattr(changed.training, name) for name in sizes})
        plans = [step_of_one_rank(settings).micro_batches for settings in (current, changed)]
        return changed.training == same_but_sizes and plans[0] == plans[1]
    return False


def _trace_more(
    tried: Sequence[_Tried], generation: GenerationEstimate, tracers: Tracers, stages: int | None = None
) -> None:
    """Trace the next ``stages`` of each change, or all that are missing; the engines are as before."""
    chosen = [(each, stage) for each in tried for stage in each.missing[:stages]]
    jobs = [Job(each.settings, stage) for each, stage in chosen]
    for (each, stage), job, trace in zip(chosen, jobs, tracers.trace(jobs), strict=True):
        each.missing.remove(stage)
        try:
            each.ranks += _forecasts([job], [trace], generation)
        except ValueError:
            each.fails = True


def stages_of_change(settings: Settings) -> list[int]:
    """Return the pipeline stages to trace for a change: not those between that have the layers of the first stage.

    The first stage has an embedding and the activations of more micro-batches besides.
    """
    assert settings.model.hf_checkpoint is not None
    config = read_config(settings.model.hf_checkpoint).to_dict()
    kinds = _kinds_of_stages(settings, config)
    stages = _stages(settings, config)
    return [stage for stage in stages if stage in (0, stages[-1]) or kinds[stage] != kinds[0]]


def foresee_trainer(settings: Settings) -> int:
    """Return the bytes that torch allocates on the fullest trainer rank while it scores and trains.

    Raises:
        ValueError: As ``rehearse_settings``.
    """
    assert settings.model.hf_checkpoint is not None
    stages = _stages(settings, read_config(settings.model.hf_checkpoint).to_dict())
    traces = [trace_rank(settings, stage * settings.dims.ranks_per_stage) for stage in stages]
    return max(allocated_by_trainer(settings, trace) for trace in traces)


def model_size(config: Any) -> ModelSize:
    """Count the numbers of a model, built without memory."""
    with torch.device("meta"):
        model = class_of(config).from_config(config)
    text = config.get_text_config()
    experts = next(filter(None, (getattr(text, name, None) for name in _EXPERTS)), 0)
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    encoders = set[str]()
    if reads_images(config.to_dict()):
        from miles.models.images import vision_family  # a text model reads none of it

        encoders = set(vision_family(config.model_type).encoders)
    total = active = 0
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        total += count
        if set(name.split(".")) & encoders:  # of images, not of each token
            continue
        if "embed_tokens" in name and not getattr(config, "tie_word_embeddings", False):
            continue
        active += count * chosen // experts if experts and ".experts." in name else count
    return ModelSize(total, active, experts, text.num_hidden_layers)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _forecasts(
    jobs: Sequence[Job], traces: Sequence[RankTrace | str], generation: GenerationEstimate
) -> Iterator[RankForecast]:
    """Yield the ranks that were traced. Raises ``ValueError`` with the reason why one was not."""
    for job, trace in zip(jobs, traces, strict=True):
        if isinstance(trace, str):
            raise ValueError(trace)
        yield RankForecast(job.stage, trace, phases_of_rank(job.settings, trace, generation))


def _stages(settings: Settings, config: dict[str, object]) -> list[int]:
    """Return the pipeline stages to trace: first, last, and of those between, the first of each kind.

    An earlier stage holds the activations of more micro-batches than a later one of the same layers.
    """
    count = settings.megatron.pipeline_model_parallel_size
    kinds = _kinds_of_stages(settings, config)
    first_of: dict[tuple[int, ...], int] = {}
    for stage in range(1, count - 1):
        first_of.setdefault(kinds[stage], stage)
    return sorted({0, count - 1, *first_of.values()})


def _kinds_of_stages(settings: Settings, config: dict[str, object]) -> list[tuple[int, ...]]:
    pattern: list[int] = []
    if config.get("model_type") in CONVERTED:
        shape = megatron_shape(config)
        pattern = shape.get("moe_layer_freq") or [0] * shape["num_layers"]
    return layers_of_stages(pattern, settings.megatron)


def layers_of_stages(pattern: Sequence[int], sizes: MegatronArguments) -> list[tuple[int, ...]]:
    """Return the kinds of layers that each pipeline stage has; ``pattern`` is the kind of every layer of the model.

    Stage s of an interleaved pipeline of S stages has the parts s, s + S, s + 2 S, … of the model.
    """
    stages, each = sizes.pipeline_model_parallel_size, sizes.num_layers_per_virtual_pipeline_stage
    if each is not None:
        parts = [tuple(pattern[i : i + each]) for i in range(0, len(pattern), each)]
        return [sum(parts[stage::stages], ()) for stage in range(stages)]
    first, last = sizes.decoder_first_pipeline_num_layers, sizes.decoder_last_pipeline_num_layers
    others = stages - (first is not None) - (last is not None)
    size = (len(pattern) - (first or 0) - (last or 0)) // max(1, others)
    counts = [size] * stages
    counts[0] = size if first is None else first
    counts[-1] = counts[-1] if last is None else last
    ends = [0, *accumulate(counts)]
    return [tuple(pattern[start:end]) for start, end in pairwise(ends)]


# Changes of a command that may save memory. Each is tried, and its saving is traced, not estimated.


@dataclass(frozen=True)
class Change:
    """One change: the flags in words, and the sections that it replaces."""

    words: str
    sections: Callable[[Settings], dict[str, Any]]

    def applied(self, settings: Settings) -> Settings:
        """Return the changed settings. Raises ``FlagError`` if they are not valid."""
        return validate(replace(settings, **self.sections(settings))).settings


def _set(section: str, words: str, **values: Any) -> Change:
    return Change(words, lambda settings: {section: replace(getattr(settings, section), **values)})


def changes(settings: Settings) -> Iterator[Change]:
    """Yield the changes that apply to ``settings``."""
    training, megatron, loss = settings.training, settings.megatron, settings.loss
    is_recomputed = training.gradient_checkpointing or "recompute_granularity" in dict(settings.megatron_overrides)
    if not is_recomputed:
        yield _set("training", "--gradient-checkpointing", gradient_checkpointing=True)
    if training.max_tokens_per_gpu is not None and training.max_tokens_per_gpu > 1:
        half = training.max_tokens_per_gpu // 2
        yield _set("training", f"--max-tokens-per-gpu {half}", max_tokens_per_gpu=half)
    elif not training.use_dynamic_batch_size and training.micro_batch_size > 1:
        half = training.micro_batch_size // 2
        yield _set("training", f"--micro-batch-size {half}", micro_batch_size=half)
    if not settings.parallel.dynamic_context_parallel and not settings.parallel.pads:
        size = settings.parallel.context_parallel_size * 2
        yield _set("parallel", f"--context-parallel-size {size}", context_parallel_size=size)
    if loss.log_probs_chunk_size == -1 or loss.log_probs_chunk_size > 512:
        yield _set("loss", "--log-probs-chunk-size 512", log_probs_chunk_size=512)
    if settings.backend.reads_megatron_flags:
        if not megatron.divides_optimizer:
            yield _set("megatron", "--use-distributed-optimizer", use_distributed_optimizer=True)
        if not megatron.optimizer_cpu_offload:
            yield _set("megatron", "--optimizer-cpu-offload", optimizer_cpu_offload=True)
        tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
        words = f"--tensor-model-parallel-size {tp * 2} --sequence-parallel"
        yield _set("megatron", words, tensor_model_parallel_size=tp * 2, sequence_parallel=True)
        words = f"--pipeline-model-parallel-size {pp * 2}"
        yield _set("megatron", words, pipeline_model_parallel_size=pp * 2)
        if megatron.expert_model_parallel_size > 1:
            ep = megatron.expert_model_parallel_size * 2
            yield _set("megatron", f"--expert-model-parallel-size {ep}", expert_model_parallel_size=ep)
    nodes = settings.cluster.actor_num_nodes * 2
    yield _set("cluster", f"--actor-num-nodes {nodes}", actor_num_nodes=nodes)


# Add up the memory of one device over the phases of an iteration: the trainer's trace, the engine, and the rest.


CONTEXT = int(1.5 * 2**30)  # bytes of CUDA's context, cuBLAS' workspace, and NCCL's buffers
FRAGMENTATION = 0.05  # of what comes and goes: activations, logits and buffers of communication
_FLEETING = (MemoryKind.ACTIVATIONS, MemoryKind.LOGITS, MemoryKind.COMMUNICATION)


def phases_of_rank(settings: Settings, trace: RankTrace, generation: GenerationEstimate) -> dict[Phase, Usage]:
    """Return the bytes by kind at the peak of each phase, on the device of a trainer rank.

    Args:
        settings: All sections.
        trace: Of the rank.
        generation: The engine, which shares the device with ``--colocate``.
    """
    shares = settings.cluster.colocate and generation.engines > 0
    offload = settings.offload("cuda")
    engine = {MemoryKind.ENGINE: generation.device_bytes, MemoryKind.KV_CACHE: generation.cache_bytes} if shares else {}
    while_training = {} if offload.rollout else engine
    peaks = {phase: _on_device(usage, settings) for phase, usage in trace.peaks.items()}
    resident = _on_device(trace.resident, settings)
    phases = {Phase.BUILD: _sum(peaks[Phase.BUILD], while_training)}
    if generation.engines:
        phases[Phase.GENERATE] = _sum({} if offload.train else resident, engine)
    for phase in (Phase.SCORE, Phase.TRAIN, Phase.REDUCE, Phase.OPTIMIZE):
        if phase in peaks:
            phases[phase] = _sum(peaks[phase], while_training)
    if generation.engines:
        weights = {MemoryKind.ENGINE: generation.weight_bytes} if shares and offload.rollout else while_training
        phases[Phase.SYNC] = _sum(resident, weights)
    return {phase: _with_runtime(usage) for phase, usage in phases.items()}


def allocated_by_trainer(settings: Settings, trace: RankTrace) -> int:
    """Return the bytes of tensors on a trainer rank at the peak of its iteration, the engine's turn left out."""
    return max(total(_on_device(usage, settings)) for phase, usage in trace.peaks.items() if phase is not Phase.BUILD)


def total(usage: Mapping[MemoryKind, int]) -> int:
    """Return the bytes of all kinds."""
    return sum(usage.values())


def worst_phase(phases: Mapping[Phase, Usage]) -> Phase:
    """Return the phase that needs most."""
    return max(phases, key=lambda phase: total(phases[phase]))


def _on_device(usage: Usage, settings: Settings) -> Usage:
    """Return ``usage`` without the part of the optimizer's state that ``--optimizer-cpu-offload`` keeps elsewhere."""
    sizes = settings.megatron
    if not sizes.optimizer_cpu_offload or MemoryKind.OPTIMIZER not in usage:
        return usage
    return usage | {MemoryKind.OPTIMIZER: int(usage[MemoryKind.OPTIMIZER] * (1 - sizes.optimizer_offload_fraction))}


def _sum(*usages: Mapping[MemoryKind, int]) -> Usage:
    total: Counter[MemoryKind] = Counter()
    for usage in usages:
        total.update(usage)
    return dict(total)


def _with_runtime(usage: Usage) -> Usage:
    fleeting = sum(usage.get(kind, 0) for kind in _FLEETING)
    return _sum(usage, {MemoryKind.RUNTIME: CONTEXT + int(FRAGMENTATION * fleeting)})
