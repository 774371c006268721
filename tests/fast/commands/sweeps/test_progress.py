"""A sweep prints how many runs are done, which failed and why, and how long the rest takes."""

from __future__ import annotations

import io
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from sweep_files import planned, write_run_of
from tolerance import DOUBLE_ERROR

from miles.commands.sweeps.run_queue import Ended, SweepProgress, summary
from miles.commands.sweeps.swept_run import Attempt, SweptRun


@dataclass(eq=False)
class Half:
    """A run that has done a share of its steps."""

    share: float
    name: str = ""
    log: str = ""

    def fraction(self) -> float:
        return self.share


@given(
    slots=st.integers(1, 8),
    speed=st.floats(0.1, 1e4),
    ended=st.integers(0, 40),
    running=st.lists(st.floats(0.01, 1.0), max_size=8),
    waiting=st.integers(0, 8),
)
def test_runs_of_one_speed_end_when_foreseen(
    slots: int, speed: float, ended: int, running: list[float], waiting: int
) -> None:
    """Whole runs take ``speed`` seconds in each slot, and no slot waits; some have ended and some are running."""
    runs: list[Any] = [Half(0.0) for _ in range(ended + len(running) + waiting)]
    now = [0.0]
    progress = SweepProgress(runs, 0, Console(file=io.StringIO()), lambda: now[0])
    for run in runs[:ended]:
        progress.started(run)
        progress.ended(run, attempt(0, speed), True)
    for run, share in zip(runs[ended:], running, strict=False):
        progress.started(run)
        run.share = share
    now[0] = (ended + sum(running)) * speed / slots
    seconds = progress._seconds_left()
    if not ended and not running:
        assert seconds is None
    else:
        # Shares that are done may leave almost nothing of the runs.
        left = len(runs) - ended - sum(running)
        assert seconds == pytest.approx(left * speed / slots, abs=DOUBLE_ERROR * len(runs) * speed)


class Watch:
    """A sweep of three runs, its clock, and the lines that it has printed."""

    def __init__(self, folder: Path, terminal: bool = False) -> None:
        _, runs = planned(folder, {"save": "x", "save_interval": "1"}, seeds="3")
        self.runs = [SweptRun(run) for run in runs]
        self.now = 0.0
        self.out = io.StringIO()
        console = Console(file=self.out, force_terminal=terminal, width=200)
        self.progress = SweepProgress(self.runs, 2, console, lambda: self.now)

    def lines(self) -> list[str]:
        return self.out.getvalue().splitlines()


def attempt(status: int, seconds: float, last_line: str = "the end") -> Attempt:
    return Attempt("2026-01-01 10:00:00", seconds, status, last_line)


def test_each_end_is_a_line_with_what_is_left(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    first, second, third = watch.runs
    watch.progress.started(first)
    watch.now += 90
    watch.progress.ended(first, attempt(0, 90), True)
    watch.progress.started(second)
    second.begin()
    watch.now += 5
    watch.progress.repeats(second, attempt(1, 5, "it broke"))
    watch.progress.started(second)
    watch.now += 5
    watch.progress.ended(second, attempt(-9, 5), False)
    watch.progress.started(third)
    watch.now += 90
    watch.progress.ended(third, attempt(0, 90), True)
    assert watch.lines() == [
        "[3/5] run seed 1: finished in 1m30s; about 3m00s left",
        f"[3/5] run seed 2: failed with status 1: it broke ({second.log}); trying once more: it starts again, as it "
        "has no checkpoint",
        f"[3/5] run seed 2: ended by SIGKILL: the end ({second.log}); about 1m40s left",
        "[4/5] run seed 3: finished in 1m30s",
    ]


def test_a_run_that_resumes_counts_with_what_is_left_of_it(tmp_path: Path) -> None:
    _, runs = planned(tmp_path, seeds="2")
    half = write_run_of(runs[0], steps=5)
    out = io.StringIO()
    now = [0.0]
    progress = SweepProgress([half, SweptRun(runs[1])], 0, Console(file=out, width=200), lambda: now[0])
    progress.started(half)
    write_run_of(runs[0])
    now[0] = 50.0
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
