"""Choose the training backend and the engine of a command that names none."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from miles.base.flags import count
from miles.base.processes import importing_miles
from miles.base.text import one_line
from miles.config.components import ENGINES, TRAIN_BACKENDS, EngineSpec, TrainBackendSpec
from miles.config.model import readable_config
from miles.config.settings import Settings
from miles.models.packing import is_compared_by_test, model_type, why_not_trained
from miles.models.registry import BRIDGED, CONVERTED
from miles.tasks.rewards.registry import deciding_part

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


def choose_backend(value: str | None, megatron_flags: Iterable[str], only_fsdp: str | None = None) -> ChosenValue:
    """Choose ``--train-backend``: the one that is given, Megatron if the command has flags of it, else FSDP.

    Args:
        value: The value of ``--train-backend``; None if it is not given.
        megatron_flags: The flags of Megatron in the command, in order.
        only_fsdp: The type of the model, if FSDP trains it and Megatron does not.
    """
    if value is not None:
        return ChosenValue(value, "--train-backend")
    first = next(iter(megatron_flags), None)
    megatron = first_with(TRAIN_BACKENDS, "reads_megatron_flags")
    other = first_with(TRAIN_BACKENDS, "reads_megatron_flags", wanted=False)
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
    if config.get("model_type") in BRIDGED and settings.megatron.uses_bridge:
        return None
    is_trained = is_compared_by_test(config) and why_not_trained(config) is None
    return model_type(config) if is_trained else None


def choose_device(value: str, has_gpu: bool, joined: JoinedCluster | None) -> ChosenValue:
    """Choose cuda or cpu: as ``--device`` states, or cuda if this host or the cluster that the run joins has a GPU.

    Args:
        value: The value of ``--device``.
        has_gpu: Whether this host has a GPU.
        joined: The GPUs of the Ray cluster that the run joins, or why they are not known; None if it was not asked.
    """
    if value != "auto":
        return ChosenValue(value, f"--device {value}")
    if has_gpu:
        return ChosenValue("cuda", "this host has a GPU")
    if joined is None:
        return ChosenValue("cpu", "this host has no GPU")
    if joined.gpus:
        return ChosenValue("cuda", joined.in_words)
    return ChosenValue("cpu", f"this host has no GPU; {joined.in_words}")


def choose_engine(value: str | None, server_flags: Iterable[str], device: ChosenValue) -> ChosenValue:
    """Choose ``--rollout-engine``: the one that is given or has flags in the command, else SGLang if CUDA is there.

    Args:
        value: The value of ``--rollout-engine``; None if it is not given.
        server_flags: The flags of servers in the command, in order.
        device: The device that was chosen.
    """
    if value is not None:
        return ChosenValue(value, "--rollout-engine")
    first = next(iter(server_flags), None)
    if first is not None:
        name = next(name for name, row in ENGINES.items() if first.startswith(row.prefixes))
        return ChosenValue(name, f"the command has {first}")
    return ChosenValue(first_with(ENGINES, "has_servers", device.value == "cuda"), device.why)


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


# Ask a Ray cluster for its GPUs before the run joins it, in a separate process: validation imports no Ray.


ASKING = "miles.run.gpus_of_cluster"
ANSWER_SECONDS = 2.0  # for a cluster to answer
PROCESS_SECONDS = 60.0  # for the process that asks, which imports Ray: 0.5 s, or many on a busy host
LONGEST_FAULT = 200  # characters


@dataclass(frozen=True)
class JoinedCluster:
    """Hold a cluster's report on its GPUs.

    Attributes:
        address: Its address, as given.
        gpus: Its GPUs; None if they are not known.
        fault: Why not.
    """

    address: str
    gpus: int | None
    fault: str = ""

    @property
    def in_words(self) -> str:
        """The known facts, in a few words."""
        if self.gpus is None:
            return f"the GPUs of the Ray cluster at {self.address} are not known ({self.fault})"
        return f"the Ray cluster at {self.address} has {count(self.gpus, 'GPU') if self.gpus else 'no GPU'}"


@functools.cache
def joined_cluster(address: str) -> JoinedCluster:
    """Ask the cluster at ``address``, once in this process; returns after seconds if it does not answer."""
    words = [sys.executable, "-P", "-m", ASKING, address, str(ANSWER_SECONDS)]
    try:
        ended = subprocess.run(
            words,
            env=os.environ | importing_miles(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROCESS_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return JoinedCluster(address, None, f"asking it took more than {PROCESS_SECONDS:g} s")
    if ended.returncode == -signal.SIGALRM:
        return JoinedCluster(address, None, f"it did not answer within {ANSWER_SECONDS:g} s")
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        return JoinedCluster(address, None, one_line(lines[-1] if lines else "no answer", LONGEST_FAULT))
    if "fault" in answer:
        return JoinedCluster(address, None, one_line(answer["fault"].split(". ")[0], LONGEST_FAULT))
    return JoinedCluster(address, int(answer["gpus"]))


Spec = TypeVar("Spec", TrainBackendSpec, EngineSpec)


def first_with(rows: Mapping[str, Spec], ability: str, wanted: bool = True) -> str:
    """Return the first backend or engine that has ``ability``, or lacks it."""
    return next(name for name, row in rows.items() if getattr(row, ability) is wanted)


def deciding_metric(names: Iterable[str], prefix: str) -> str | None:
    """Return the metric among ``names`` of the reward that decides whether a trajectory passes; None without parts."""
    start = f"{prefix}reward_parts/"
    part = deciding_part(name.removeprefix(start) for name in names if name.startswith(start))
    return None if part is None else start + part
