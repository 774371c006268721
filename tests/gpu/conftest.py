"""Tests that need GPUs: ``pytest tests/gpu``. Without GPUs or a package they are skipped, as the summary reports."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.fast.run.conftest import launch, workplace  # noqa: F401  # fixtures
from tests.gpu.tiny_families import DENSE, write_family

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GPUS = torch.cuda.device_count()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return a folder with a random dense model, whose heads are of a size that GPU kernels take, and a tokenizer."""
    folder = tmp_path_factory.mktemp("dense")
    write_family(DENSE, folder, seed=0)
    return str(folder)


@pytest.fixture
def run_program(tmp_path):
    """Return ``run(name, *arguments)``, which runs a program of this folder and returns the JSON that it prints last.

    It gets a separate process, because Megatron creates its process groups once per process, and an empty folder as
    its last argument.
    """

    def run(name, *arguments):
        own = [str(ROOT), str(ROOT / "tests/fast/conformance"), str(ROOT / "tests/fast/support")]
        paths = [*own, *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            [sys.executable, str(HERE / name), *arguments, str(tmp_path)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=570,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def needed_packages(item):
    if item.path.name.startswith("test_sglang"):
        return ["sglang", "torch_memory_saver"] if "turns" in item.name else ["sglang"]
    if item.path.name.startswith("test_vllm"):
        return ["vllm"]
    return ["megatron"] if "megatron" in item.name else []


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE not in item.path.parents:  # the hook also gets the tests of other folders
            continue
        absent = [name for name in needed_packages(item) if find_spec(name) is None]
        if absent:
            item.add_marker(pytest.mark.skip(reason=f"{absent[0]} is not installed"))
        marker = item.get_closest_marker("gpus")
        needed = marker.args[0] if marker else 1
        if needed > GPUS:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs; this machine has {GPUS}"))


def pytest_terminal_summary(terminalreporter):
    skipped = len(terminalreporter.stats.get("skipped", ()))
    if skipped:
        terminalreporter.section("NOT TESTED", red=True, bold=True)
        terminalreporter.line(f"{skipped} tests were skipped on this machine of {GPUS} GPUs; -rs states why.")
