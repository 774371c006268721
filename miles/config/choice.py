"""Choose the training backend and the engine of a command that names none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from miles.base.flags import count
from miles.config.abilities import first_with
from miles.config.components import ENGINES, TRAIN_BACKENDS
from miles.config.joined_cluster import JoinedCluster
from miles.config.model import readable_config
from miles.config.settings import Settings
from miles.models.packing import is_compared_by_test, model_type, why_not_trained
from miles.models.registry import BRIDGED, CONVERTED

RANKS_ON_CUDA = 8


@dataclass(frozen=True)
class ChosenValue:
    """Hold a value that was chosen, and why.

    Attributes:
        value: The value of the flag.
        why: The reason, in a few words.
    """

    value: Any
    why: str


def choose_backend(given: str | None, megatron_flags: Iterable[str], only_fsdp: str | None = None) -> ChosenValue:
    """Choose ``--train-backend``: the one that is given, Megatron if the command has flags of it, else FSDP.

    Args:
        given: The value of ``--train-backend``; None if it is not given.
        megatron_flags: The flags of Megatron in the command, in order.
        only_fsdp: The type of the model, if FSDP trains it and Megatron does not.
    """
    if given is not None:
        return ChosenValue(given, "--train-backend")
    first = next(iter(megatron_flags), None)
    megatron, other = (first_with(TRAIN_BACKENDS, "reads_megatron_flags", wanted) for wanted in (True, False))
    if first is None:
        return ChosenValue(other, "the command has no flag of Megatron")
    if only_fsdp is not None:
        return ChosenValue(other, f"the command has {first}, but the Megatron backend has no layers for a {only_fsdp}")
    return ChosenValue(megatron, f"the command has {first}")


def trained_without_megatron(settings: Settings) -> str | None:
    """Return the type of the model if FSDP was compared with transformers on it, and Megatron does not train it.

    None for a model that is not on this machine, and for one whose configuration is broken: both are judged later.
    """
    config = readable_config(settings.model)
    if config is None or config.get("model_type") in CONVERTED:
        return None
    if config.get("model_type") in BRIDGED and settings.megatron.megatron_to_hf_mode == "bridge":
        return None
    is_trained = is_compared_by_test(config) and why_not_trained(config) is None
    return model_type(config) if is_trained else None


def choose_device(given: str, has_gpu: bool, joined: JoinedCluster | None) -> ChosenValue:
    """Choose cuda or cpu: as ``--device`` states, or cuda if this host or the cluster that the run joins has a GPU.

    Args:
        given: The value of ``--device``.
        has_gpu: Whether this host has a GPU.
        joined: The GPUs of the Ray cluster that the run joins, or why they are not known; None if it was not asked.
    """
    if given != "auto":
        return ChosenValue(given, f"--device {given}")
    if has_gpu:
        return ChosenValue("cuda", "this host has a GPU")
    if joined is None:
        return ChosenValue("cpu", "this host has no GPU")
    if joined.gpus:
        return ChosenValue("cuda", joined.in_words)
    return ChosenValue("cpu", f"this host has no GPU; {joined.in_words}")


def choose_engine(given: str | None, server_flags: Iterable[str], device: ChosenValue) -> ChosenValue:
    """Choose ``--rollout-engine``: the one that is given or has flags in the command, else SGLang if CUDA is there.

    Args:
        given: The value of ``--rollout-engine``; None if it is not given.
        server_flags: The flags of servers in the command, in order.
        device: The device that was chosen.
    """
    if given is not None:
        return ChosenValue(given, "--rollout-engine")
    servers, embedded = (first_with(ENGINES, "has_servers", wanted) for wanted in (True, False))
    first = next(iter(server_flags), None)
    if first is not None:
        name = next(name for name, row in ENGINES.items() if first.startswith(row.prefixes))
        return ChosenValue(name, f"the command has {first}")
    return ChosenValue(servers if device.value == "cuda" else embedded, device.why)


def choose_ranks(device: ChosenValue, cores: int) -> ChosenValue:
    """Choose ``--actor-num-gpus-per-node``: 8 on CUDA, and one rank for two cores on CPU.

    Args:
        device: The device that was chosen.
        cores: The cores of this host.
    """
    if device.value == "cuda":
        return ChosenValue(RANKS_ON_CUDA, "the default on CUDA")
    return ChosenValue(max(1, cores // 2), f"one for two of {count(cores, 'core')}")


def in_words(backend: ChosenValue, engine: ChosenValue, ranks: ChosenValue | None, device: ChosenValue | None) -> str:
    """Say in one line what was chosen, and why.

    Args:
        backend: The training backend.
        engine: The engine.
        ranks: The trainer ranks per node; None if their number is given.
        device: The device; None if no cluster was asked about it.
    """
    text = f"backend {backend.value} ({backend.why}), engine {engine.value} ({engine.why})"
    if device is not None and device.why != engine.why:
        text += f", device {device.value} ({device.why})"
    return text if ranks is None else f"{text}, {count(ranks.value, 'trainer rank')} per node ({ranks.why})"
