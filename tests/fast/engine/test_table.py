"""The table of engines."""

from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest

from miles.arguments.rollout import RolloutArguments
from miles.engine.base import ReleasesMemory
from miles.engine.embedded.torch_engine import TorchEngine
from miles.engine.sglang.engine import SglangEngine
from miles.engine.table import ENGINES, start_engine


def test_every_choice_of_the_flag_has_an_engine():
    assert ENGINES.keys() == set(get_args(RolloutArguments.__annotations__["rollout_engine"]))


async def test_an_unknown_name_is_refused():
    settings = SimpleNamespace(rollout=replace(RolloutArguments(), rollout_engine="vllm"))
    with pytest.raises(ValueError, match="--rollout-engine vllm: unknown; choose from torch, sglang"):
        await start_engine(settings, host=None)


def test_servers_release_memory_and_the_embedded_engine_does_not():
    assert issubclass(SglangEngine, ReleasesMemory) and not issubclass(TorchEngine, ReleasesMemory)
