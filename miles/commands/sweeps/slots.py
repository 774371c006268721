"""Places for runs at a time: each has its share of the cores, and GPUs of its own as far as there are enough."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles.base.flags import FlagError, count
from miles.base.host.machine import cpu_quota, has_gpu
from miles.config.settings import Settings

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Slot:
    """A place for one run at a time.

    Attributes:
        cores: The cores that its run may use.
        gpus: The GPUs that its run sees, as CUDA_VISIBLE_DEVICES names them; None: whatever this process sees.
    """

    cores: frozenset[int]
    gpus: tuple[str, ...] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that limit a run to it."""
        return {} if self.gpus is None else {VISIBLE: ",".join(self.gpus)}

    def __str__(self) -> str:
        cores = count(len(self.cores), "core")
        return cores if self.gpus is None else f"{cores} and GPU {','.join(self.gpus)}"


@dataclass(frozen=True)
class Machine:
    """What this process may use: cores by number, how many of them it may keep busy, and GPUs."""

    cores: tuple[int, ...]
    busy: float
    gpus: tuple[str, ...]

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> Machine:
        """Look at this machine."""
        cores = tuple(sorted(os.sched_getaffinity(0)))
        found = tuple(name for path in devices.glob("nvidia*") if re.fullmatch(r"\d+", name := path.name[6:]))
        gpus = tuple(str(number) for number in range(len(found)))
        if VISIBLE in environment:
            gpus = tuple(filter(None, (part.strip() for part in environment[VISIBLE].split(","))))
        return cls(cores, min(len(cores), cpu_quota() or len(cores)), gpus)


def devices_of(settings: Settings) -> int:
    """Return the devices of a run: those of the trainer and, unless they share, those for generation."""
    trainer = settings.cluster.world_size if settings.trains else 0
    if settings.cluster.colocate:
        return trainer
    return trainer + (settings.engine_devices if settings.num_engines else 1)


def slots(jobs: int | None, runs: Sequence[Settings], machine: Machine) -> list[Slot]:
    """Return the places for runs at a time.

    Args:
        jobs: How many, ``--jobs``; by default as many as have devices of their own. On CPU a device is a core. Runs on
            a cluster, or with engines that are running already, are one at a time by default.
        runs: The settings of the runs.
        machine: What there is.

    Raises:
        FlagError: A run needs more GPUs than there are, or several at a time would write their weights to one engine.
    """
    needed = max(devices_of(settings) for settings in runs)
    joined = any(settings.cluster.ray_address is not None for settings in runs)
    devices = {settings.cluster.device for settings in runs}
    uses_gpus = not joined and ("cuda" in devices or ("auto" in devices and has_gpu()))
    if uses_gpus and needed > len(machine.gpus):
        what_to_do = "lower --actor-num-gpus-per-node or --rollout-num-gpus, add --colocate, or use another machine"
        raise FlagError(f"a run needs {count(needed, 'GPU')} and this machine has {len(machine.gpus)}; {what_to_do}")
    share_engines = sum(settings.sglang.rollout_external and settings.generates for settings in runs) > 1
    if share_engines and jobs is not None and jobs > 1:
        rule = "all runs write their weights to the engines of --rollout-external, so only one may run at a time"
        raise FlagError(f"--jobs {jobs}: {rule}; give --jobs 1, or drop --rollout-external")
    if jobs is None:
        there = len(machine.gpus) if uses_gpus else int(machine.busy)
        jobs = 1 if joined or share_engines else max(1, there // needed)
    found = []
    for number in range(min(jobs, len(runs))):
        gpus = (
            tuple(machine.gpus[(number * needed + k) % len(machine.gpus)] for k in range(needed)) if uses_gpus else None
        )
        found.append(Slot(_share(machine.cores, number, min(jobs, len(runs))), gpus))
    return found


def _share(cores: Sequence[int], number: int, among: int) -> frozenset[int]:
    """Return an even share of the cores; one core, which others have too, if there are more shares than cores."""
    if among > len(cores):
        return frozenset({cores[number % len(cores)]})
    return frozenset(cores[number * len(cores) // among : (number + 1) * len(cores) // among])
