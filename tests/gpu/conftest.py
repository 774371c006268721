"""Tests of what only GPUs can do: ``pytest tests/gpu``. Without one, nothing is tested, and that is said loudly."""

import pytest
import torch

from tests.fast.cluster.conftest import launch, workplace  # noqa: F401  # fixtures
from tests.fast.conftest import tiny_model  # noqa: F401

GPUS = torch.cuda.device_count()


def pytest_collection_modifyitems(items):
    for item in items:
        marker = item.get_closest_marker("gpus")
        needed = marker.args[0] if marker else 1
        if needed > GPUS:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, and there are {GPUS}"))


def pytest_terminal_summary(terminalreporter):
    skipped = len(terminalreporter.stats.get("skipped", ()))
    if skipped:
        terminalreporter.section("NOT TESTED", red=True, bold=True)
        terminalreporter.line(f"{skipped} tests need more GPUs than the {GPUS} here: what they cover is unverified.")
