"""List the training backends, the generation engines and the teachers: abilities, and the function that builds each.

To add one, add a row. Validation reads these rows, so they are plain data: functions are imported by ``call`` only,
because each backend and engine has its own libraries.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from miles.config.servers.passed_on import ROUTER, SERVER, VLLM


@dataclass(frozen=True)
class TrainBackendSpec:
    """The abilities of a choice of ``--train-backend``.

    Attributes:
        builder: The function ``build(settings, device, total_steps) -> TrainBackend``, as ``module:function``.
        exporter: The function ``export(settings, checkpoint, folder)`` that writes the weights of a checkpoint as a
            Hugging Face folder, on one rank, as ``module:function``.
        importer: The function ``import(device)`` that imports what ``builder`` needs beyond its own module, as
            ``module:function``; empty if there is nothing.
        reads_megatron_flags: Whether it reads the section ``megatron``, and accepts megatron-core's own fields.
        trains_recurrent_models: Whether it trains models with recurrent layers.
        trains_images: Whether it trains models with their vision towers.
        long_samples_change_others: Whether one long sample changes the rotary frequencies of its whole micro-batch, as
            transformers' layers do with the kinds longrope and dynamic.
        trains_without_ray: Whether it trains in a run that is one process (``miles sweep --one-process``).
        checkpoint_json: The JSON files that it adds to a checkpoint.
        rehearsal: The function that builds it without weights, with the arguments of ``builder``: ``--rehearse``.
    """

    builder: str
    exporter: str
    rehearsal: str
    importer: str = ""
    reads_megatron_flags: bool = False
    trains_recurrent_models: bool = False
    trains_images: bool = False
    long_samples_change_others: bool = False
    trains_without_ray: bool = False
    checkpoint_json: tuple[str, ...] = ()


def stop_pattern(text: str) -> str:
    """Return the regular expression that ends a response of SGLang at ``text``.

    SGLang searches as many of the last tokens as the longest match has characters, and one more. A character may take
    as many tokens as it has bytes, so the pattern allows that many further characters.
    """
    more = len(text.encode()) - len(text)
    return re.escape(text) + (f".{{0,{more}}}" if more else "")


@dataclass(frozen=True)
class StopTextLimits:
    """How many texts may end a response at most, and how many bytes the pattern of each may have."""

    number: int
    bytes: int

    def why_not(self, text: str) -> str | None:
        """Return why ``text`` is too long, as the end of a sentence that begins with the engine; None if it is not."""
        length = len(stop_pattern(text).encode())
        if length <= self.bytes:
            return None
        return f"takes a regular expression of at most {self.bytes} bytes, and for this text it has {length}"


@dataclass(frozen=True)
class EngineSpec:
    """The properties of a choice of ``--rollout-engine``.

    Attributes:
        builder: The coroutine ``start(settings, host) -> Engine``, as ``module:function``.
        title: Its name in messages.
        has_servers: Whether it generates in servers, by the flags of the section ``sglang`` and those passed on to it.
            Otherwise it is embedded in the rollout process, and runs on one device.
        reports_experts: Whether it can return the experts that it chose (``--use-rollout-routing-replay``).
        stop_text_limits: Its limits to the texts that end a response; None if it has none.
        prefixes: How the flags begin that its servers take. They choose it if no engine is named.
        rules: With servers, the function ``check(settings, errors)`` that checks a run of them, as ``module:function``.
        applies_temperature: Whether its log-probs over the whole vocabulary are at the temperature of sampling.
        start_rules: The function that checks what only a start needs; empty if there is none.
    """

    builder: str
    title: str = "PyTorch"
    has_servers: bool = False
    reports_experts: bool = False
    stop_text_limits: StopTextLimits | None = None
    prefixes: tuple[str, ...] = ()
    rules: str = ""
    applies_temperature: bool = True
    start_rules: str = ""


TRAIN_BACKENDS: Mapping[str, TrainBackendSpec] = {
    "fsdp": TrainBackendSpec(
        "miles.training.fsdp.backend:build",
        "miles.training.fsdp.checkpoint:export",
        "miles.training.fsdp.rehearsed:build",
        trains_recurrent_models=True,
        trains_images=True,
        long_samples_change_others=True,
        trains_without_ray=True,
    ),
    "megatron": TrainBackendSpec(
        "miles.training.megatron:build",
        "miles.training.megatron:export",
        "miles.training.megatron:build_rehearsed",
        importer="miles.training.megatron:import_backend",
        reads_megatron_flags=True,
        checkpoint_json=("metadata.json",),
    ),
}

ENGINES: Mapping[str, EngineSpec] = {
    "torch": EngineSpec(
        "miles.engine.embedded.torch_engine:start",
        reports_experts=True,
    ),
    "sglang": EngineSpec(
        "miles.engine.sglang.engine:start",
        title="SGLang",
        has_servers=True,
        reports_experts=True,
        stop_text_limits=StopTextLimits(32, 256),  # MAX_STOP_REGEX_COUNT and _LEN of SGLang's sampling_params.py
        prefixes=(SERVER, ROUTER),
        rules="miles.config.sglang.rules:check_servers",
    ),
    "vllm": EngineSpec(
        "miles.engine.vllm.engine:start",
        title="vLLM",
        has_servers=True,
        prefixes=(VLLM,),
        applies_temperature=False,
        rules="miles.config.vllm.rules:check_servers",
        start_rules="miles.config.vllm.rules:check_start",
    ),
}

# What scores samples for distillation, by the name that --opd-type gives it: a function
# ``connect(settings, share) -> ServedTeacher``, as ``module:function``. (The trainer's own teacher is a model there.)
TEACHERS: Mapping[str, str] = {"server": "miles.engine.servers.teacher:connect"}

Spec = TypeVar("Spec", TrainBackendSpec, EngineSpec)


def train_backend_spec(name: str) -> TrainBackendSpec:
    """Return the backend that ``--train-backend`` names. Raises ``ValueError`` for a name without a row."""
    return _row(TRAIN_BACKENDS, "--train-backend", name)


def engine_spec(name: str) -> EngineSpec:
    """Return the engine that ``--rollout-engine`` names. Raises ``ValueError`` for a name without a row."""
    return _row(ENGINES, "--rollout-engine", name)


def _row(rows: Mapping[str, Spec], flag: str, name: str) -> Spec:
    if name not in rows:
        raise ValueError(f"{flag} {name}: unknown; choose from {', '.join(rows)}")
    return rows[name]


def names_with(rows: Mapping[str, Spec], ability: str) -> str:
    """Return the names of the rows with ``ability``, as an error offers them: ``fsdp or another``."""
    return " or ".join(name for name, row in rows.items() if getattr(row, ability))


def import_builder(spec: TrainBackendSpec | EngineSpec) -> None:
    """Import the module of a builder, which takes seconds."""
    pkgutil.resolve_name(spec.builder)


def import_code(spec: TrainBackendSpec, device: Any) -> None:
    """Import the modules that a backend's builder needs on ``device``, which takes seconds."""
    import_builder(spec)
    if spec.importer:
        call(spec.importer, device)


def call(function: str, *arguments: Any) -> Any:
    """Import a function of these rows, ``module:function``, and call it."""
    return pkgutil.resolve_name(function)(*arguments)
