"""The table of training backends and engines is all that names them."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest
import torch

import miles
from miles.config.components import ENGINES, TEACHERS, TRAIN_BACKENDS, names_with
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.config.training import TrainingArguments
from miles.engine.base import ReleasesMemory, start_engine
from miles.engine.embedded.torch_engine import TorchEngine
from miles.engine.sglang.engine import SglangEngine
from miles.training.backend import build_backend

PACKAGE = Path(miles.__file__).parent


@pytest.mark.parametrize("name", [*TRAIN_BACKENDS, *ENGINES])
def test_every_row_names_a_builder_that_exists(name: str) -> None:
    spec = {**TRAIN_BACKENDS, **ENGINES}[name]
    assert callable(pkgutil.resolve_name(spec.builder))


@pytest.mark.parametrize("name", TEACHERS)
def test_every_teacher_names_a_function_that_exists(name: str) -> None:
    assert callable(pkgutil.resolve_name(TEACHERS[name]))


def test_an_unknown_backend_is_refused() -> None:
    settings = Settings(training=TrainingArguments(train_backend="another"))
    with pytest.raises(ValueError, match="--train-backend another: unknown; choose from fsdp, megatron"):
        build_backend(settings, torch.device("cpu"), total_steps=1)


async def test_an_unknown_engine_is_refused() -> None:
    settings = Settings(rollout=RolloutArguments(rollout_engine="lmdeploy"))
    with pytest.raises(ValueError, match="--rollout-engine lmdeploy: unknown; choose from torch, sglang, vllm"):
        await start_engine(settings, host=None)


def test_errors_offer_the_choices_with_an_ability() -> None:
    assert names_with(TRAIN_BACKENDS, "trains_recurrent_models") == "fsdp"
    assert names_with(ENGINES, "has_servers") == "sglang or vllm"
    assert names_with(TRAIN_BACKENDS, "trains_images") == "fsdp"


def test_servers_release_memory_and_the_embedded_engine_does_not() -> None:
    assert issubclass(SglangEngine, ReleasesMemory) and not issubclass(TorchEngine, ReleasesMemory)


def test_no_other_file_compares_the_name_of_a_backend_or_engine() -> None:
    names = "|".join([*TRAIN_BACKENDS, *ENGINES])
    quoted = rf"[\"'](?:{names})[\"']"
    compared = re.compile(
        rf"(?:==|!=|\bin|\bis) *[\[({{]? *{quoted}|{quoted} *(?:==|!=|\bin\b)|\bcase {quoted}|{quoted} *:"
    )
    matches = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != PACKAGE / "config" / "components.py"
        if path.parents[1] != PACKAGE / "compat" / "translate"  # other trainers' engines
        for line in path.read_text(encoding="utf-8").splitlines()
        if compared.search(line)
    ]
    assert not matches
