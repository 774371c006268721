"""Commands that go through the whole of the command line: read, normalize, validate."""

from collections.abc import Callable

import pytest

from miles.base.flags import FlagError
from miles.config.parser import judge, read_command
from miles.config.validate import Validated
from tests.fast.config.conftest import minimal

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
