"""Run commands, some at a time: each in a process of its own with its share of the machine; a failed one once more.

One thread per place starts and awaits processes; it is bound to the cores of its place, and a process inherits the
cores of the thread that starts it. The main thread receives what happens, and signals, and reports both.

    signal that stops a run, to the sweep    what happens
    once                                     nothing more is started; the running commands get SIGTERM, at which a
                                             training run finishes its iteration and saves (unless it shares GPUs with
                                             its engines)
    a second time                            they get it again: a training run stops at its last checkpoint
    a third time                             they are killed
"""

from __future__ import annotations

import os
import queue
import shlex
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import miles
from miles.base.one_line import one_line
from miles.base.secret_values import public_words
from miles.commands.sweeps.child_process import Child, Starter, start_process
from miles.commands.sweeps.slots import Slot
from miles.commands.sweeps.swept_run import Attempt
from miles.run.stop_requests import STOPS

TICK_SECONDS = 1.0
WRONG_FLAGS = 2  # exit status of a command that would fail again


class Task(Protocol):
    """A command to run."""

    @property
    def name(self) -> str:
        """The task as people read it."""

    @property
    def log(self) -> Path:
        """The file for all that it prints."""

    @property
    def is_finished(self) -> bool:
        """Whether it has done all that it was to do; exit status 0 alone does not say so."""

    def begin(self) -> None:
        """Prepare the folder of the log."""

    def command(self) -> list[str]:
        """Return the words of the next attempt."""

    def note(self, attempt: Attempt) -> None:
        """Keep an attempt."""


class Listener(Protocol):
    """Receives the events of a queue, in the main thread."""

    def started(self, task: Any) -> None:
        """Note that an attempt at a task begins."""

    def ended(self, task: Any, attempt: Attempt, is_finished: bool) -> None:
        """Note that an attempt ended that will not be repeated."""

    def repeats(self, task: Any, attempt: Attempt) -> None:
        """Note that an attempt failed and the task is tried once more."""

    def stopping(self, number: int, times: int, running: int) -> None:
        """Note that a signal stops the queue, for the ``times``-th time, with so many tasks running."""

    def tick(self) -> None:
        """Note that a second has passed."""


@dataclass
class Ended:
    """How a queue ended.

    Attributes:
        finished: The tasks that came to their end.
        failed: The tasks that failed twice, with the last attempt of each.
        signal: The signal that stopped the queue; None if none did.
    """

    finished: list[Any] = field(default_factory=list)
    failed: list[tuple[Any, Attempt]] = field(default_factory=list)
    signal: int | None = None


class RunQueue:
    """Runs tasks in order, one at a time in each of its places."""

    def __init__(
        self, tasks: Sequence[Task], slots: Sequence[Slot], listener: Listener, start: Starter = start_process
    ) -> None:
        self._start = start
        self._waiting = deque(tasks)
        self._slots = slots
        self._listener = listener
        self._events: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # held to start processes and to signal them, so that none is missed
        self._children: list[Child] = []
        self._is_stopping = False

    def run(self) -> Ended:
        """Run all tasks; return when none is running any more."""
        ended = Ended()
        signals = 0
        with ThreadPoolExecutor(len(self._slots), "sweep") as threads, self._listening():
            places = [threads.submit(self._work, slot) for slot in self._slots]
            for place in places:
                place.add_done_callback(lambda place: self._events.put(("place", (place,))))
            try:
                left = len(places)
                while left:
                    try:
                        event, values = self._events.get(timeout=TICK_SECONDS)
                    except queue.Empty:
                        self._listener.tick()
                        continue
                    if event == "place":
                        left -= 1
                        values[0].result()  # raises what stopped the thread
                    elif event == "signal":
                        signals += 1
                        ended.signal = values[0]
                        running = self._stop(signal.SIGTERM if signals < 3 else signal.SIGKILL)
                        self._listener.stopping(values[0], signals, running)
                    elif event == "started":
                        self._listener.started(*values)
                    elif event == "repeats":
                        self._listener.repeats(*values)
                    else:
                        assert event == "ended"
                        task, attempt, is_finished = values
                        if is_finished:
                            ended.finished.append(task)
                        elif ended.signal is None:
                            ended.failed.append((task, attempt))
                        self._listener.ended(*values)
            except BaseException:
                self._stop(signal.SIGTERM)
                raise
        return ended

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Turn signals into events. A SIGHUP that is ignored (``nohup``) stays ignored."""

        def note(number: int, frame: FrameType | None) -> None:
            self._events.put(("signal", (number,)))

        numbers = [n for n in STOPS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        former = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _stop(self, number: int) -> int:
        """Start nothing more, and send a signal to all running processes; return how many there are."""
        with self._lock:
            self._is_stopping = True
            running = [child for child in self._children if child.poll() is None]
            for child in running:
                child.send_signal(number)
            return len(running)

    def _work(self, slot: Slot) -> None:
        """Do tasks in one place until none is waiting: a thread."""
        os.sched_setaffinity(0, slot.cores)  # of this thread, and of the processes that it starts
        while (task := self._next()) is not None:
            for is_last in (False, True):
                attempt = self._attempt(task, slot)
                if attempt is None:
                    break
                is_finished = attempt.status == 0 and task.is_finished
                if is_finished or is_last or self._is_stopping or attempt.status == WRONG_FLAGS:
                    self._events.put(("ended", (task, attempt, is_finished)))
                    break
                self._events.put(("repeats", (task, attempt)))

    def _next(self) -> Task | None:
        with self._lock:
            return None if self._is_stopping or not self._waiting else self._waiting.popleft()

    def _attempt(self, task: Task, slot: Slot) -> Attempt | None:
        """Run a task once; None if the queue is stopping."""
        task.begin()
        words = task.command()
        began, clock = time.strftime("%Y-%m-%d %H:%M:%S"), time.monotonic()
        with task.log.open("ab") as log:
            log.write(f"--- {began} {shlex.join(public_words(words))}\n".encode())
            position = log.tell()
        with self._lock:
            if self._is_stopping:
                return None
            child = self._start(words, task.log, {**os.environ, **importing_miles(), **slot.environment})
            self._children.append(child)
        self._events.put(("started", (task,)))
        status = child.wait()
        with self._lock:
            self._children.remove(child)
        attempt = Attempt(began, time.monotonic() - clock, status, last_line(task.log, position))
        task.note(attempt)
        return attempt


def last_line(log: Path, begin: int, most: int = 1 << 16) -> str:
    """Return the last line of a log that is not empty, from position ``begin`` on and of its last ``most`` bytes."""
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - most))
        lines = file.read().decode("utf-8", "replace").split("\n")
    return next((one_line(line.strip(), 500) for line in reversed(lines) if line.strip()), "")


def importing_miles() -> Mapping[str, str]:
    """Return the environment in which a process finds this miles, also if it is not installed."""
    package = Path(miles.__file__).resolve().parent.parent
    if str(package).startswith(sys.prefix):
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))}
