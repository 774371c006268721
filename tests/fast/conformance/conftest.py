"""Fixtures: the ranks that run the cases, and the model they train.

The ranks start on first use and end with the last test of this folder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # tests are no packages; rank.py imports its neighbours the same way

from ranks import Ranks, started_ranks  # noqa: E402

STARTED: pytest.StashKey[tuple[Ranks, ExitStack]] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the ranks after the last test of this folder."""
    try:
        yield
    finally:
        if STARTED in item.session.stash and (nextitem is None or HERE not in nextitem.path.parents):
            _, ending = item.session.stash[STARTED]
            del item.session.stash[STARTED]
            ending.close()


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Return the ranks that the tests of this folder share."""
    stash = request.session.stash
    if STARTED not in stash:
        ending = ExitStack()
        stash[STARTED] = ending.enter_context(started_ranks(tmp_path_factory.mktemp("conformance"))), ending
    return stash[STARTED][0]


@pytest.fixture(scope="module")
def oracle(ranks: Ranks) -> Any:
    from oracle import load_oracle

    return load_oracle(str(ranks.folder / "untied"))
