"""Checkpoints of the Megatron backend, on real ranks over gloo; the checks are in checkpoint_checks.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
WRITTEN = 9  # layouts that write, in checkpoint_checks.CHANGES
READ = 11


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("megatron-checkpoints")
    folders = [ROOT, ROOT / "tests/fast", ROOT / "tests/fast/conformance"]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(HERE / "launch_checkpoints.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


def _failures(results: dict[str, dict[str, str]], ending: str, count: int) -> str:
    chosen = {title: checks for title, checks in results.items() if title.endswith(ending)}
    assert len(chosen) == count, sorted(chosen)
    return "\n\n".join(
        f"{title}: {check}\n{failure}"
        for title, checks in chosen.items()
        for check, failure in checks.items()
        if failure
    )


@pytest.mark.timeout(300)
def test_every_layout_saves(results: dict[str, dict[str, str]]) -> None:
    assert not _failures(results, ": saved", WRITTEN)


@pytest.mark.timeout(300)
def test_every_layout_resumes_from_the_others(results: dict[str, dict[str, str]]) -> None:
    assert not _failures(results, ": resumed", READ)


@pytest.mark.timeout(300)
def test_kill_while_saving_leaves_the_last_checkpoint(results: dict[str, dict[str, str]]) -> None:
    assert results["killed"] == {"killed_while_saving": "".join(f"rank {r} of dp2 did not finish\n" for r in range(2))}
    assert not _failures(results, "after the kill", 1)
