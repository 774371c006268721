"""A smallest valid command line, to which a test adds the flags it is about."""

from collections.abc import Callable

import pytest

from miles.arguments.parser import parse
from miles.arguments.validate import Validated, validate

MINIMAL = {
    "--hf-checkpoint": "some/model",
    "--prompt-data": "reasoning_gym:products",
    "--rm-type": "last_number",
    "--num-rollout": "10",
    "--rollout-batch-size": "8",
    "--n-samples-per-prompt": "4",
    "--rollout-max-response-len": "64",
}


def minimal(flags: str = "", without: str = "") -> list[str]:
    """The words of the smallest command, less the flags ``without``, with ``flags`` added."""
    kept = {name: value for name, value in MINIMAL.items() if name not in without.split()}
    return [*(word for pair in kept.items() for word in pair), *flags.split()]


@pytest.fixture
def command() -> Callable[..., list[str]]:
    return minimal


@pytest.fixture
def validated() -> Callable[..., Validated]:
    def parse_and_validate(flags: str = "", without: str = "") -> Validated:
        return validate(parse(minimal(flags, without)))

    return parse_and_validate
