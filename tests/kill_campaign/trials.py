"""What the campaign tries: set-ups, targets, signals, moments, and the order of the trials."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, replace

SERVERS = ["--sglang-max-total-tokens", "4096", "--sglang-max-running-requests", "32"]
SGLANG = ["--rollout-engine", "sglang", *SERVERS, "--rollout-health-check-interval", "2", "--rollout-num-gpus", "1"]
TWO_SGLANG = [*SGLANG[:-1], "2"]  # with a router in front of them
ASYNC = ["--async-steps", "1", "--use-tis"]
MEGATRON = ["--train-backend", "megatron"]
SETUPS: dict[str, list[str]] = {
    "fsdp, torch, sync": [],
    "fsdp, torch, async": ASYNC,
    "fsdp, sglang, sync": SGLANG,
    "fsdp, sglang, async": [*SGLANG, *ASYNC],
    "megatron, torch, sync": MEGATRON,
    "megatron, torch, async": [*MEGATRON, *ASYNC],
    "megatron, sglang, sync": [*MEGATRON, *SGLANG],
    "megatron, sglang, async": [*MEGATRON, *SGLANG, *ASYNC],
    "fsdp, two sglang, sync": TWO_SGLANG,
}
STRATIFIED = "fsdp, torch, sync"  # every target, signal and moment once; the other set-ups are drawn at random
SERIES = 3  # at most so many signals to a run and to those that resume it

# By target: how its processes are found (a part of the name or the command line), and the pattern of what the last line
# blames.
TARGETS: dict[str, tuple[str, str]] = {
    "launcher": ("train.py", "stopped by"),
    "gcs": ("gcs_server", "Ray's GCS"),
    "raylet": ("raylet", "Ray's raylet"),
    "rollout actor": ("ray::RolloutActor", "rollout worker"),
    "trainer rank": ("ray::TrainActor", "trainer rank 0"),
    "engine": ("sglang_on_cpu", r"engine \d"),
    "scheduler": ("sglang::scheduler", r"engine \d"),
    "engine actor": ("ray::EngineActor", r"engine \d"),
    "router": ("sglang::router", "the router"),
}
OF_SGLANG = ("engine", "scheduler", "engine actor")
OF_TWO = ("router",)
SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP, "TERM": signal.SIGTERM}
MOMENTS = ("load", "generate", "train", "sync_weights", "eval", "save")


@dataclass(frozen=True)
class Trial:
    """One kill. ``delay`` is the seconds between the beginning of the moment's phase and the signal."""

    setup: str
    target: str
    signal: str
    moment: str
    occurrence: int
    delay: float
    restarts: bool

    @property
    def name(self) -> str:
        """The trial as a key, without what is drawn at random."""
        return " | ".join((self.setup, self.target, self.signal, self.moment))

    @property
    def folder_name(self) -> str:
        """The same as the name of a folder."""
        return self.name.replace(" | ", "_").replace(", ", "_").replace(" ", "_")


def targets_of(setup: str) -> list[str]:
    missing = (() if "sglang" in setup else OF_SGLANG) + (() if "two sglang" in setup else OF_TWO)
    return [target for target in TARGETS if target not in missing]


def drawn(rng: random.Random, setup: str, target: str, sent: str, moment: str, latest: int = 2) -> Trial:
    """Draw the rest of a trial, whose moment comes for the first to the ``latest``th time."""
    occurrence = 1 if moment == "load" else rng.randint(1, latest)
    return Trial(setup, target, sent, moment, occurrence, round(rng.expovariate(5.0), 3), rng.random() < 0.3)


def strata(seed: int) -> list[Trial]:
    """Return every target, signal and moment of ``STRATIFIED`` once, in random order."""
    rng = random.Random(seed)
    kinds = [(target, sent, moment) for target in targets_of(STRATIFIED) for sent in SIGNALS for moment in MOMENTS]
    rng.shuffle(kinds)
    return [drawn(rng, STRATIFIED, *kind) for kind in kinds]


def random_series(seed: int, number: int) -> list[Trial]:
    """Return random trials of one set-up: for a run, for the run that resumes it, and so on.

    A resumed run has fewer iterations left, so its signal comes at the first occurrence of a moment. All trials of a
    series run with ``--max-restarts``, or none. Another ``number`` gives another series.
    """
    rng = random.Random(f"{seed} {number}")
    setup = rng.choice(list(SETUPS))
    found = [
        drawn(rng, setup, rng.choice(targets_of(setup)), rng.choice(list(SIGNALS)), rng.choice(MOMENTS), latest)
        for latest in (2, *[1] * (SERIES - 1))
    ]
    return [replace(trial, restarts=found[0].restarts) for trial in found]
