"""The trials of the campaign: set-ups, targets, signals, moments, and which of them comes next."""

from __future__ import annotations

import itertools
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SERVERS = ["--sglang-max-total-tokens", "4096", "--sglang-max-running-requests", "32"]
SGLANG = ["--rollout-engine", "sglang", *SERVERS, "--rollout-health-check-interval", "2", "--rollout-num-gpus", "1"]
VLLM = ["--rollout-engine", "vllm", "--vllm-max-model-len", "128", "--rollout-health-check-interval", "2"]
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
    "fsdp, vllm, sync": VLLM,
    "fsdp, vllm, async": [*VLLM, *ASYNC],
}

# By target: the kind of its process (``launches.kind_of``), and the pattern of the cause in the last line.
TARGETS: dict[str, tuple[str, str]] = {
    "launcher": ("train.py", "stopped by"),
    "launcher and guard": ("train.py", "stopped by"),
    "gcs": ("gcs_server", "Ray's GCS"),
    "raylet": ("raylet", "Ray's raylet"),
    "rollout actor": ("ray::RolloutActor", "rollout worker"),
    "trainer rank": ("ray::TrainActor", "trainer rank 0"),
    "engine": ("sglang_on_cpu", r"engine \d"),
    "scheduler": ("sglang::scheduler", r"engine \d"),
    "engine actor": ("ray::EngineActor", r"engine \d"),
    "router": ("sglang::router", "the router"),
    "vllm server": ("vllm.entrypoints.openai.api_server", r"engine \d"),
    "vllm core": ("VLLM::EngineCore", r"engine \d"),
}
REPLACED_BY_RESTART = ("gcs", "raylet", "trainer rank")  # the others are replaced while the run continues
# The targets that only set-ups with a word in their name have.
ONLY_OF = {
    "engine": "sglang",
    "scheduler": "sglang",
    "router": "two sglang",
    "vllm server": "vllm",
    "vllm core": "vllm",
}
SIGNALS = {name: signal.Signals[f"SIG{name}"] for name in ("KILL", "STOP", "TERM", "QUIT", "ABRT", "HUP", "INT")}
LOAD = "load"  # the moment that only a run that resumes has, once
MOMENTS = (LOAD, "generate", "train", "sync_weights", "eval", "save")
Kind = tuple[str, str, str, str]  # set-up, target, signal, moment


@dataclass(frozen=True)
class Trial:
    """One signal. It is sent ``delay`` seconds after the moment's phase began for the ``occurrence``th time from now.

    With ``restarts`` the run has ``--max-restarts 1``.
    """

    setup: str
    target: str
    signal: str
    moment: str
    occurrence: int
    delay: float
    restarts: bool

    @property
    def kind(self) -> Kind:
        """The trial without its random draws."""
        return self.setup, self.target, self.signal, self.moment

    @property
    def is_pause(self) -> bool:
        """Whether the process continues after a while."""
        return self.target == "launcher" and self.signal == "STOP"

    @property
    def is_to_launcher(self) -> bool:
        return self.target.startswith("launcher")

    @property
    def name(self) -> str:
        return " | ".join(self.kind)


def kinds_of(setup: str) -> list[Kind]:
    """Return every target, signal and moment of a set-up."""
    targets = [t for t in TARGETS if ONLY_OF.get(t, "") in setup and (t != "engine actor" or "torch" not in setup)]
    return [kind for kind in itertools.product([setup], targets, SIGNALS, MOMENTS) if ends(kind[1], kind[2])]


def ends(target: str, name: str) -> bool:
    """Return whether a signal ends or stops a target: the guard ignores all but SIGKILL, and Ray blocks SIGINT."""
    return name == "KILL" or (target != "launcher and guard" and (name != "INT" or target == "launcher"))


class Plan:
    """Draws trials at random: of the target that was tried least often on the set-up, the kind tried least often.

    Of that target, a signal and moment that were tried on no set-up come first. Threads may share it.
    """

    def __init__(self, tried: Iterable[Kind], setups: Sequence[str]) -> None:
        self.count = Counter(tried)
        self.setups = setups
        self.lock = threading.Lock()

    def setup(self, rng: random.Random) -> str:
        """Draw a set-up. One that has more kinds that were never tried comes more often."""
        new = {setup: sum(not self.count[kind] for kind in kinds_of(setup)) for setup in self.setups}
        return rng.choices(self.setups, [1 + number for number in new.values()])[0]

    def trial(self, rng: random.Random, setup: str, resumes: bool, restarts: bool) -> Trial:
        """Draw a trial for a run of ``setup``, and count it as tried. ``resumes``: the run is about to load."""
        kinds = [kind for kind in kinds_of(setup) if resumes or kind[3] != LOAD]
        with self.lock:
            anywhere = {kind[1:] for kind, count in self.count.items() if count}
            of_target = Counter[str]()
            for (tried_on, target, *_), count in self.count.items():
                of_target[target] += count if tried_on == setup else 0
            times = {kind: (of_target[kind[1]], kind[1:] in anywhere, self.count[kind]) for kind in kinds}
            kind = rng.choice([kind for kind in kinds if times[kind] == min(times.values())])
            self.count[kind] += 1
        occurrence = 1 if kind[3] == LOAD else rng.randint(1, 2)
        return Trial(*kind, occurrence, round(rng.expovariate(5.0), 3), restarts)

    def give_back(self, trial: Trial) -> None:
        """Count a trial as not tried, because its signal reached no process."""
        with self.lock:
            self.count[trial.kind] -= 1
