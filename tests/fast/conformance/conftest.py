"""Fixtures: the ranks that run the cases, and the model they train. Both start once per session, on first use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests are no packages; rank.py imports its neighbours the same way

from ranks import Ranks, started_ranks  # noqa: E402


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with started_ranks(tmp_path_factory.mktemp("conformance")) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def oracle(ranks: Ranks) -> Any:
    from oracle import load_oracle

    return load_oracle(str(ranks.folder / "untied"))
