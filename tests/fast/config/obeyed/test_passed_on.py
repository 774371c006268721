"""Flags that are passed on unchanged: each reaches the component that knows it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from miles.compat.border import read_command
from miles.config.megatron.fields import megatron_fields
from miles.config.megatron.rules import TRIED
from miles.config.parser import judge
from miles.config.sglang.installed import CONFIG, router_flags, server_flags
from miles.config.sglang.rules import (
    DATA_PARALLEL,
    FILES,
    OTHER_PARALLEL,
    OWNED_BY_LAUNCHER,
    RENAMED,
    REPLACED,
    TENSOR_PARALLEL,
    WITHOUT_KEYS,
)
from miles.engine.servers.keys import Keys
from miles.engine.servers.processes import LogFile
from miles.engine.sglang.engine import server_program
from miles.engine.sglang.router import Router

VALUES = {  # others of recomputation are noted: they change memory only
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "moe_router_dtype": "fp64",
}
OTHERWISE = {*OWNED_BY_LAUNCHER, *OTHER_PARALLEL, *DATA_PARALLEL, *TENSOR_PARALLEL, *RENAMED, *REPLACED, CONFIG}
SGLANG = "--rollout-engine sglang --device cuda --actor-num-gpus-per-node 1"


def values(accepted):
    """Words that a flag of SGLang accepts."""
    choices = [choice for choice in accepted.choices if choice is not None]
    return [] if accepted.most == 0 else [str(choices[0])] if choices else ["1"]


def test_every_flag_of_sglang_is_in_the_command_of_its_server(command):
    flags = sorted(server_flags().keys() - OTHERWISE - {*WITHOUT_KEYS})
    if not flags:
        pytest.skip("SGLang is not installed")
    taken = {flag: [__file__] if flag in FILES else values(server_flags()[flag]) for flag in flags}
    taken["--load-format"] = [
        "flash_rl"
    ]  # which quantizes the trainer's weights: with others --quantization is refused
    words = [word for flag in flags for word in (f"--sglang-{flag[2:]}", *taken[flag])]
    settings = judge(read_command([*command(SGLANG), *words])).settings
    server = server_program(settings, "cuda", 0, Keys())
    started = {*server.arguments("127.0.0.1", 1), *server.secret_arguments}
    assert len(flags) > 300 and not set(flags) - started


def test_every_flag_of_the_router_is_in_its_command(command, monkeypatch):
    flags = sorted(router_flags().keys() - {*OWNED_BY_LAUNCHER})
    words = [word for flag in flags for word in (f"--router-{flag[2:]}", *values(router_flags()[flag]))]
    settings = judge(read_command([*command(f"{SGLANG} --rollout-num-gpus 2"), *words])).settings
    monkeypatch.setattr(Router, "_run", lambda self: MagicMock())
    router = Router(settings.server_flags.router, "127.0.0.1", LogFile(Path("router.log")), 1)
    assert not set(flags) - {*router._words, *router._secret_words}


def test_the_router_ends_no_answer_that_takes_hours(monkeypatch):
    monkeypatch.setattr(Router, "_run", lambda self: MagicMock())
    words = Router((), "127.0.0.1", LogFile(Path("router.log")), 1)._words
    assert "--request-timeout-secs" in router_flags()
    assert int(words[words.index("--request-timeout-secs") + 1]) > 24 * 3600


def test_every_tried_field_of_megatron_is_in_its_configuration(command):
    pytest.importorskip("megatron.core")
    import torch

    from miles.training.megatron.model.transformer_config import ddp_config, transformer_config

    fields = [megatron_fields()[name] for name in TRIED]
    inputs = {field.name: field.switch_to if field.kind == "bool" else VALUES[field.name] for field in fields}
    words = [word for field in fields for word in (field.flag, *([] if field.kind == "bool" else [inputs[field.name]]))]
    settings = judge(read_command([*command("--train-backend megatron --device cpu"), *map(str, words)])).settings
    shape = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_moe_experts": 2}
    fixed = {"gradient_checkpointing": False, "per_token_loss": True}
    configs = [
        transformer_config(settings.megatron, settings.megatron_overrides, shape, torch.float32, **fixed),
        ddp_config(settings.megatron, settings.megatron_overrides),
    ]
    for field in fields:
        (config,) = (config for config in configs if hasattr(config, field.name))
        assert getattr(config, field.name) == inputs[field.name] != field.default, field.name
