"""A sweep prints how many runs are done, which failed and why, and how long the rest takes."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from sweep_files import planned, write_run_of
from tolerance import DOUBLE_ERROR

from miles.commands.sweeps.run_queue import Ended, QueueTimeLeft, SweepProgress, summary
from miles.commands.sweeps.swept_run import Attempt, SweptRun


@given(
    slots=st.integers(1, 8),
    runs=st.integers(1, 40),
    speed=st.floats(0.1, 1e4),
    ended=st.integers(0, 40),
    running=st.lists(st.floats(0.01, 1.0), max_size=8),
)
def test_runs_of_one_speed_end_when_foreseen(
    slots: int, runs: int, speed: float, ended: int, running: list[float]
) -> None:
    """Whole runs take ``speed`` seconds; some have ended and some are running."""
    ended = min(ended, runs)
    running = running[: runs - ended]
    left = QueueTimeLeft(slots, [1.0] * runs)
    for _ in range(ended):
        left.ended(1.0, speed)
    seconds = left.seconds([(share, share * speed) for share in running])
    if not ended and not running:
        assert seconds is None
    else:
        # Shares that are done may leave almost nothing of the runs.
        assert seconds == pytest.approx((runs - ended - sum(running)) * speed / slots, abs=DOUBLE_ERROR * runs * speed)


class Watch:
    """A sweep of three runs, its clock, and the lines that it has printed."""

    def __init__(self, folder: Path, terminal: bool = False) -> None:
        _, runs = planned(folder, {"save": "x", "save_interval": "1"}, seeds="3")
        self.runs = [SweptRun(run) for run in runs]
        self.now = 0.0
        self.out = io.StringIO()
        console = Console(file=self.out, force_terminal=terminal, width=200)
        self.progress = SweepProgress(self.runs, 2, 1, console, lambda: self.now)

    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()


def attempt(status: int, seconds: float, last_line: str = "the end") -> Attempt:
    return Attempt("2026-01-01 10:00:00", seconds, status, last_line)


def test_each_end_is_a_line_with_what_is_left(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    first, second, third = watch.runs
    watch.progress.started(first)
    watch.progress.ended(first, attempt(0, 90), True)
    watch.progress.started(second)
    second.begin()
    watch.progress.repeats(second, attempt(1, 5, "it broke"))
    watch.progress.started(second)
    watch.progress.ended(second, attempt(-9, 5), False)
    watch.progress.started(third)
    watch.now += 90
    watch.progress.ended(third, attempt(0, 90), True)
    assert watch.lines() == [
        "[3/5] run seed 1: finished in 1m30s; about 3m00s left",
        f"[3/5] run seed 2: failed with status 1: it broke ({second.log}); trying once more: it starts again, as it "
        "has no checkpoint",
        f"[3/5] run seed 2: ended by SIGKILL: the end ({second.log}); about 1m30s left",
        "[4/5] run seed 3: finished in 1m30s",
    ]


def test_a_run_that_resumes_counts_with_what_is_left_of_it(tmp_path: Path) -> None:
    _, runs = planned(tmp_path, seeds="2")
    half = write_run_of(runs[0], steps=5)
    out = io.StringIO()
    progress = SweepProgress([half, SweptRun(runs[1])], 0, 1, Console(file=out, width=200), lambda: 0.0)
    progress.started(half)
    write_run_of(runs[0])
    progress.ended(half, attempt(0, 50), True)
    assert "about 1m40s left" in out.getvalue(), "half a run took 50 s"


def test_a_terminal_has_a_bar_with_what_is_running(tmp_path: Path) -> None:
    watch = Watch(tmp_path, terminal=True)
    watch.progress.started(watch.runs[0])
    write_run_of(watch.runs[0].planned, steps=4)
    watch.now = 40.0
    watch.progress.tick()
    watch.progress.close()
    output = watch.out.getvalue()
    assert "run seed 1 40%" in output and "left 4m20s" in output and "2/5" in output


@pytest.mark.parametrize(("times", "words"), [(1, "finish an iteration"), (2, "last checkpoint"), (3, "killing")])
def test_a_signal_is_answered(tmp_path: Path, times: int, words: str) -> None:
    watch = Watch(tmp_path)
    watch.progress.stopping(signal.SIGINT, times, 2)
    (line,) = watch.lines()
    assert line.startswith("SIGINT: ") and words in line and "2 runs" in line


def test_the_last_lines_say_what_failed_and_how_to_go_on(tmp_path: Path) -> None:
    run: Any = Watch(tmp_path).runs[0]
    said = summary(Ended(failed=[(run, attempt(3, 1, "gold"))]), 2, "miles sweep x.yaml")
    assert said.splitlines() == [
        "1 run failed:",
        f"  run seed 1: failed with status 3: gold ({run.log})",
        "2 runs are not finished; miles sweep x.yaml continues, and runs nothing again that is finished",
    ]
    assert summary(Ended(), 0, "miles sweep x.yaml") == ""
