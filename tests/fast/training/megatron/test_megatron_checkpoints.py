"""Checkpoints of the Megatron backend, on real ranks over gloo; the checks are in checkpoint_checks.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_scripts import run_checks

WRITTEN = 12  # layouts that write, in checkpoint_checks.CHANGES
READ = 13


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("megatron-checkpoints")
    return run_checks(Path(__file__).with_name("launch_checkpoints.py"), folder, seconds=870)


def _failures(results: dict[str, dict[str, str]], ending: str, count: int) -> str:
    chosen = {title: checks for title, checks in results.items() if title.endswith(ending)}
    assert len(chosen) == count, sorted(chosen)
    return "\n\n".join(
        f"{title}: {check}\n{failure}"
        for title, checks in chosen.items()
        for check, failure in checks.items()
        if failure
    )


@pytest.mark.timeout(900)
def test_every_layout_saves(results: dict[str, dict[str, str]]) -> None:
    assert not _failures(results, ": saved", WRITTEN)


@pytest.mark.timeout(900)
def test_every_layout_resumes_from_the_others(results: dict[str, dict[str, str]]) -> None:
    assert not _failures(results, ": resumed", READ)


@pytest.mark.timeout(900)
def test_kill_while_saving_leaves_the_last_checkpoint(results: dict[str, dict[str, str]]) -> None:
    ends = results["killed"]["killed_while_saving"].splitlines()
    assert [end.partition(": ")[0] for end in ends] == [f"rank {rank} of dp2 did not finish" for rank in range(2)]
    assert any(end.endswith(": ended by SIGKILL") for end in ends)
    assert not _failures(results, "after the kill", 1)
