"""Choose the training backend and the engine of a command that names none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from miles.arguments.launch.abilities import first_with
from miles.arguments.model import local_config
from miles.arguments.settings import Settings
from miles.components import ENGINES, TRAIN_BACKENDS
from miles.flags import count
from miles.model_families.packing import is_compared_by_test, model_type, why_not_trained
from miles.model_families.registry import BRIDGED, CONVERTED

RANKS_ON_CUDA = 8


@dataclass(frozen=True)
class Choice:
    """Hold a value that was chosen, and why.

    Attributes:
        value: The value of the flag.
        why: The reason, in a few words.
    """

    value: Any
    why: str


def choose_backend(given: str | None, megatron_flags: Iterable[str], only_fsdp: str | None = None) -> Choice:
    """Choose ``--train-backend``: the one that is given, Megatron if the command has flags of it, else FSDP.

    Args:
        given: The value of ``--train-backend``; None if it is not given.
        megatron_flags: The flags of Megatron in the command, in order.
        only_fsdp: The type of the model, if FSDP trains it and Megatron does not.
    """
    if given is not None:
        return Choice(given, "--train-backend")
    first = next(iter(megatron_flags), None)
    megatron, other = (first_with(TRAIN_BACKENDS, "reads_megatron_flags", wanted) for wanted in (True, False))
    if first is None:
        return Choice(other, "the command has no flag of Megatron")
    if only_fsdp is not None:
        return Choice(other, f"the command has {first}, but the Megatron backend has no layers for a {only_fsdp}")
    return Choice(megatron, f"the command has {first}")


def trained_without_megatron(settings: Settings) -> str | None:
    """Return the type of the model if FSDP was compared with transformers on it, and Megatron does not train it.

    None for a model that is not in a local folder, and for one whose configuration is broken: both are judged later.
    """
    try:
        config = local_config(settings.model, "hf_checkpoint")
    except ValueError:
        return None
    if config is None or config.get("model_type") in CONVERTED:
        return None
    if config.get("model_type") in BRIDGED and settings.megatron.megatron_to_hf_mode == "bridge":
        return None
    is_trained = is_compared_by_test(config) and why_not_trained(config) is None
    return model_type(config) if is_trained else None


def choose_engine(given: str | None, server_flags: Iterable[str], device: str, has_gpu: bool) -> Choice:
    """Choose ``--rollout-engine``: the one that is given, SGLang if the command has flags of it or CUDA is there.

    Args:
        given: The value of ``--rollout-engine``; None if it is not given.
        server_flags: The flags of SGLang and its router in the command, in order.
        device: The value of ``--device``.
        has_gpu: Whether this host has a GPU.
    """
    if given is not None:
        return Choice(given, "--rollout-engine")
    servers, embedded = (first_with(ENGINES, "has_servers", wanted) for wanted in (True, False))
    first = next(iter(server_flags), None)
    if first is not None:
        return Choice(servers, f"the command has {first}")
    if device == "cuda":
        return Choice(servers, "--device cuda")
    if device == "auto" and has_gpu:
        return Choice(servers, "this host has a GPU")
    return Choice(embedded, "--device cpu" if device == "cpu" else "this host has no GPU")


def choose_ranks(device: str, has_gpu: bool, cores: int) -> Choice:
    """Choose ``--actor-num-gpus-per-node``: 8 on CUDA, and one rank for two cores on CPU.

    Args:
        device: The value of ``--device``.
        has_gpu: Whether this host has a GPU.
        cores: The cores of this host.
    """
    if device == "cuda" or (device == "auto" and has_gpu):
        return Choice(RANKS_ON_CUDA, "the default on CUDA")
    return Choice(max(1, cores // 2), f"one for two of {count(cores, 'core')}")


def in_words(backend: Choice, engine: Choice, ranks: Choice | None) -> str:
    """Say in one line what was chosen, and why. ``ranks`` is None if their number is given."""
    text = f"backend {backend.value} ({backend.why}), engine {engine.value} ({engine.why})"
    return text if ranks is None else f"{text}, {count(ranks.value, 'trainer rank')} per node ({ranks.why})"
