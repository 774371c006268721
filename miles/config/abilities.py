"""Ask which flags the chosen backend and engine read, before their names are checked too, and what rewards decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from miles.config.components import ENGINES, TRAIN_BACKENDS, EngineSpec, TrainBackendSpec
from miles.config.settings import Settings
from miles.config.sglang.flags import VLLM
from miles.tasks.rewards.passing import deciding_part

Spec = TypeVar("Spec", TrainBackendSpec, EngineSpec)


def reads_megatron_flags(settings: Settings) -> bool:
    """Return whether the training backend reads the flags of Megatron."""
    backend = TRAIN_BACKENDS.get(settings.training.train_backend)
    return backend is not None and backend.reads_megatron_flags


def has_servers(settings: Settings) -> bool:
    """Return whether the engine generates in servers."""
    engine = ENGINES.get(settings.rollout.rollout_engine)
    return engine is not None and engine.has_servers


def reads_sglang_flags(settings: Settings) -> bool:
    """Return whether the engine generates in SGLang's servers."""
    engine = ENGINES.get(settings.rollout.rollout_engine)
    return engine is not None and engine.reads_sglang_flags


def reads_vllm_flags(settings: Settings) -> bool:
    """Return whether the engine generates in vLLM's servers."""
    engine = ENGINES.get(settings.rollout.rollout_engine)
    return engine is not None and VLLM in engine.prefixes


def first_with(rows: Mapping[str, Spec], ability: str, wanted: bool = True) -> str:
    """Return the first backend or engine that has ``ability``, or lacks it."""
    return next(name for name, row in rows.items() if getattr(row, ability) is wanted)


def deciding_metric(names: Iterable[str], prefix: str) -> str | None:
    """Return the metric, among ``names``, of the reward that decides whether a sample passes; None without parts."""
    start = f"{prefix}reward_parts/"
    part = deciding_part(name.removeprefix(start) for name in names if name.startswith(start))
    return None if part is None else start + part
