"""What a sweep prints while it runs: a line for every run that ends, how many are left, and for how long."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from miles.base.flags import count
from miles.commands.sweeps.run_queue import Ended
from miles.commands.sweeps.swept_run import Attempt, SweptRun
from miles.observe.tracking.console import in_words


class TimeLeft:
    """Foresees when a queue ends, from the speed of its runs.

    Args:
        places: Runs at a time.
        runs: The share of each run that is left to do (1: all of it).
    """

    def __init__(self, places: int, runs: Sequence[float]) -> None:
        self._places = places
        self._left = sum(runs)  # in whole runs, without what is running
        self._done = 0.0
        self._seconds = 0.0

    def ended(self, share: float, seconds: float) -> None:
        """Count a run that has ended; it did ``share`` of a whole run in ``seconds``."""
        self._left -= share
        self._done += share
        self._seconds += seconds

    def given_up(self, share: float) -> None:
        """Count a run that failed for good; ``share`` of a whole run is left out."""
        self._left -= share

    def seconds(self, running: Sequence[tuple[float, float]]) -> float | None:
        """Return the seconds until all runs have ended; None as long as nothing is known.

        Args:
            running: Of each run that is running: the share of a whole run that it has done, and its seconds so far.
        """
        done = self._done + sum(share for share, _ in running)
        seconds = self._seconds + sum(seconds for _, seconds in running)
        if done <= 0:
            return None
        left = max(0.0, self._left - sum(share for share, _ in running))
        return left * seconds / done / self._places


class SweepProgress:
    """Prints what happens in a queue; on a terminal also a bar.

    Args:
        runs: The runs that are to be done.
        finished: How many runs are finished already.
        places: How many run at a time.
        console: Where to print.
        clock: Seconds, as ``time.monotonic``.
    """

    def __init__(
        self,
        runs: Sequence[SweptRun],
        finished: int,
        places: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._clock = clock
        self._total = len(runs) + finished
        self._done = finished
        self._begun_with = {id(run): run.fraction() for run in runs}
        self._left = TimeLeft(min(places, len(runs)) or 1, [1 - share for share in self._begun_with.values()])
        self._running: dict[int, tuple[SweptRun, float]] = {}
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, TextColumn("{task.description}"), console=self._console)
            self._task = self._bar.add_task("", total=self._total, completed=finished)
            self._bar.start()

    def close(self) -> None:
        """Release the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def started(self, run: SweptRun) -> None:
        """Remember when the run began."""
        self._running[id(run)] = (run, self._clock())
        self._refresh()

    def ended(self, run: SweptRun, attempt: Attempt, is_finished: bool) -> None:
        """Print that a run has ended, and what is left."""
        self._running.pop(id(run), None)
        self._done += is_finished
        if is_finished:
            self._left.ended(1 - self._begun_with[id(run)], attempt.seconds)
            what = f"finished in {in_words(attempt.seconds)}"
        else:
            self._left.given_up(1 - self._begun_with[id(run)])
            what = f"{_how(attempt.status)}: {attempt.last_line} ({run.log})"
        left = self._seconds_left()
        more = "" if left is None or left < 0.5 else f"; about {in_words(left)} left"
        self._print(f"[{self._done}/{self._total}] {run.name}: {what}{more}")
        self._refresh()

    def repeats(self, run: SweptRun, attempt: Attempt) -> None:
        """Print that a run failed and is tried once more."""
        self._running.pop(id(run), None)
        shown = f"{_how(attempt.status)}: {attempt.last_line} ({run.log}); trying once more: it {run.in_words()}"
        self._print(f"[{self._done}/{self._total}] {run.name}: {shown}")

    def stopping(self, number: int, times: int, running: int) -> None:
        """Print what a signal does."""
        name = signal.Signals(number).name
        runs = count(running, "run")
        if times == 1:
            text = f"{name}: stopping; waiting for {runs} to finish an iteration and save (a second signal: sooner)"
        elif times == 2:
            text = f"{name}: stopping {runs} at the last checkpoint (a third signal kills)"
        else:
            text = f"{name}: killing {runs}"
        self._print(text)

    def tick(self) -> None:
        """Bring the bar up to date."""
        self._refresh()

    def _seconds_left(self) -> float | None:
        now = self._clock()
        running = [
            (max(0.0, run.fraction() - self._begun_with[id(run)]), now - began) for run, began in self._running.values()
        ]
        return self._left.seconds(running)

    def _refresh(self) -> None:
        if self._bar is not None:
            left = self._seconds_left()
            names = ", ".join(f"{run.name} {run.fraction():.0%}" for run, _ in self._running.values())
            self._bar.update(
                self._task,
                completed=self._done,
                description=names + ("" if left is None else f"  left {in_words(left)}"),
            )

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


def summary(ended: Ended, unfinished: int, again: str) -> str:
    """Return the last lines: what failed, and how to continue.

    Args:
        ended: How the queue ended.
        unfinished: Runs that are not finished.
        again: The command that continues.
    """
    lines = []
    if ended.failed:
        lines.append(f"{count(len(ended.failed), 'run')} failed:")
        for run, attempt in ended.failed:
            lines.append(f"  {run.name}: {_how(attempt.status)}: {attempt.last_line} ({run.log})")
    if unfinished:
        runs = "1 run is" if unfinished == 1 else f"{unfinished} runs are"
        lines.append(f"{runs} not finished; {again} continues, and runs nothing again that is finished")
    return "\n".join(lines)


def _how(status: int) -> str:
    """Say how a process ended."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return "ended before its last step" if status == 0 else f"failed with status {status}"
