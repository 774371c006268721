"""A smallest valid command line, to which a test adds the flags it is about."""

import re
from collections.abc import Callable

import pytest

from miles.base.flags import FlagError
from miles.compat.border import read_command
from miles.config import parser
from miles.config.parser import judge, parse
from miles.config.validate import Validated, validate

MINIMAL = {
    "--hf-checkpoint": "some/model",
    "--prompt-data": "reasoning_gym:products",
    "--rm-type": "last_number",
    "--num-rollout": "10",
    "--rollout-batch-size": "8",
    "--n-samples-per-prompt": "4",
    "--rollout-max-response-len": "64",
}

# The config of a small dense model.
QWEN3 = dict(
    model_type="qwen3",
    num_hidden_layers=4,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
    max_position_embeddings=128,
)


def minimal(flags: str = "", without: str = "") -> list[str]:
    """The words of the smallest command, minus the flags ``without``, with ``flags`` added."""
    defaults = {name: value for name, value in MINIMAL.items() if name not in without.split()}
    return [*(word for pair in defaults.items() for word in pair), *flags.split()]


@pytest.fixture(autouse=True)
def bf16(monkeypatch):
    """A CPU with bf16 arithmetic, whose default is bf16, on every machine."""
    monkeypatch.setattr(parser, "has_bf16", lambda: True)


@pytest.fixture
def command() -> Callable[..., list[str]]:
    return minimal


@pytest.fixture
def validated() -> Callable[..., Validated]:
    def parse_and_validate(flags: str = "", without: str = "") -> Validated:
        return validate(parse(minimal(flags, without)))

    return parse_and_validate


@pytest.fixture
def refused() -> Callable[..., tuple[str, ...]]:
    """The errors of a command that is refused: one line per error, with flag, rule and way out."""

    def messages(flags: str = "", without: str = "") -> tuple[str, ...]:
        with pytest.raises(FlagError) as caught:
            validate(parse(minimal(flags, without)))
        for message in caught.value.messages:
            assert re.match(r"--[a-z0-9-]+.*: .*; [^\n]*$", message), message
        return caught.value.messages

    return messages


RANKS = ["--actor-num-gpus-per-node", "2"]


@pytest.fixture
def accepted() -> Callable[..., Validated]:
    def run(flags: str = "", without: str = "") -> Validated:
        return judge(read_command([*RANKS, *minimal(flags, without)]))

    return run


@pytest.fixture
def refusals() -> Callable[..., tuple[str, ...]]:
    def run(flags: str = "", without: str = "") -> tuple[str, ...]:
        with pytest.raises(FlagError) as caught:
            judge(read_command([*RANKS, *minimal(flags, without)]))
        return caught.value.messages

    return run
