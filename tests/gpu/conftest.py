"""Tests that need GPUs: ``pytest tests/gpu``. They are skipped without GPUs, and the summary says so in red."""

from pathlib import Path

import pytest
import torch

from tests.fast.cluster.conftest import launch, workplace  # noqa: F401  # fixtures
from tests.fast.conftest import tiny_model  # noqa: F401

HERE = Path(__file__).parent
GPUS = torch.cuda.device_count()


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE not in item.path.parents:  # the hook also gets the tests of other folders
            continue
        marker = item.get_closest_marker("gpus")
        needed = marker.args[0] if marker else 1
        if needed > GPUS:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs; this machine has {GPUS}"))


def pytest_terminal_summary(terminalreporter):
    skipped = len(terminalreporter.stats.get("skipped", ()))
    if skipped:
        terminalreporter.section("NOT TESTED", red=True, bold=True)
        terminalreporter.line(f"{skipped} tests were skipped: they need more GPUs than the {GPUS} on this machine.")
