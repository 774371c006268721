"""Flags that are passed on as they are: each reaches the component that knows it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from miles.arguments.launch.server import RENAMED, REPLACED
from miles.arguments.parser import judge, read_command
from miles.arguments.sglang.server_flags import (
    DATA_PARALLEL,
    OTHER_PARALLEL,
    OWNED_BY_LAUNCHER,
    TENSOR_PARALLEL,
    WITHOUT_KEYS,
    known_router_flags,
    known_server_flags,
)
from miles.engine.sglang.engine import server_spec
from miles.engine.sglang.keys import Keys
from miles.engine.sglang.router import Router
from miles.engine.sglang.server_log import LogFile

OTHERWISE = {*OWNED_BY_LAUNCHER, *OTHER_PARALLEL, *DATA_PARALLEL, *TENSOR_PARALLEL, *RENAMED, *REPLACED}
SGLANG = "--rollout-engine sglang --device cuda --actor-num-gpus-per-node 1"


def test_every_flag_of_sglang_is_in_the_command_of_its_server(command):
    flags = sorted(known_server_flags() - OTHERWISE - {*WITHOUT_KEYS})
    if not flags:
        pytest.skip("SGLang is not installed")
    words = [word for flag in flags for word in (f"--sglang-{flag[2:]}", "4")]
    settings = judge(read_command([*command(SGLANG), *words])).settings
    server = server_spec(settings, "cuda", 0, Keys())
    started = {*server.arguments("127.0.0.1", 1), *server.secret_arguments}
    assert len(flags) > 300 and not set(flags) - started


def test_every_flag_of_the_router_is_in_its_command(command, monkeypatch):
    flags = sorted(known_router_flags() - {*OWNED_BY_LAUNCHER})
    words = [word for flag in flags for word in (f"--router-{flag[2:]}", "4")]
    settings = judge(read_command([*command(f"{SGLANG} --rollout-num-gpus 2"), *words])).settings
    monkeypatch.setattr(Router, "_run", lambda self: MagicMock())
    router = Router(settings.server_flags.router, "127.0.0.1", LogFile(Path("router.log")), 1)
    assert not set(flags) - {*router._words, *router._secret_words}
