"""Add up the memory of one device over the phases of an iteration: the trainer's trace, the engine, and the rest."""

from __future__ import annotations

from collections.abc import Mapping

from miles.commands.rehearsal.generation import GenerationEstimate
from miles.commands.rehearsal.meter import MemoryKind, Phase, Usage
from miles.commands.rehearsal.trace import RankTrace
from miles.config.settings import Settings

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
    peaks, resident = {p: _on_device(u, settings) for p, u in trace.peaks.items()}, _on_device(trace.resident, settings)
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
    total: Usage = {}
    for usage in usages:
        for kind, size in usage.items():
            total[kind] = total.get(kind, 0) + size
    return total


def _with_runtime(usage: Usage) -> Usage:
    fleeting = sum(usage.get(kind, 0) for kind in _FLEETING)
    return _sum(usage, {MemoryKind.RUNTIME: CONTEXT + int(FRAGMENTATION * fleeting)})
