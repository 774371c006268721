"""Without a GPU these tests skip, and the summary says so in words that cannot be missed."""

from __future__ import annotations

import pytest
import torch

NO_GPU = "torch sees no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not torch.cuda.is_available():
        words = f"tests/gpu: NOTHING WAS TESTED ON A GPU: {NO_GPU}"
        terminalreporter.write_sep("!", words, red=True, bold=True)
