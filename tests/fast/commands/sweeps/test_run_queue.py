"""The queue, with small commands instead of training runs: order, places, retries, signals."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from miles.commands.sweeps.run_queue import RunQueue, Slot
from miles.commands.sweeps.swept_run import Attempt
from miles.run.stop_requests import STOPS

HERE = frozenset(os.sched_getaffinity(0))
SAY = """
import json, os
print("hello")
print(json.dumps([sorted(os.sched_getaffinity(0)), os.environ.get("CUDA_VISIBLE_DEVICES")]))
"""
FAIL_ONCE = """
import os, sys
if not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    print("first line")
    sys.exit("it broke")
"""
# Waits for a signal and ends as a training run does; the file states that the handler is there.
WAIT = """
import os, signal, sys
def stop(number, frame):
    if os.environ.get("DEAF"):
        print("not yet", flush=True)
        return
    print("stopped by", signal.Signals(number).name)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
open(sys.argv[1], "w").close()
while True:
    signal.pause()
"""


@dataclass
class Command:
    """A task that is finished when ``finished`` reports it: by default, when its last attempt had the status 0."""

    folder: Path
    words: list[str]
    ends: bool = True
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def is_finished(self) -> bool:
        return self.ends

    def begin(self) -> None:
        self.folder.mkdir(exist_ok=True)

    def command(self) -> list[str]:
        return [sys.executable, "-c", *self.words]

    def note(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)


class Heard:
    """A listener that keeps its events, and sends a signal to this process when all of some files are there."""

    def __init__(self, number: int | None = None, when: list[Path] | None = None, times: int = 1) -> None:
        self.events: list[tuple[str, ...]] = []
        self._signal, self._when, self._times = number, when or [], times

    def started(self, task: Any) -> None:
        self.events.append(("started", task.name))

    def ended(self, task: Any, attempt: Attempt, is_finished: bool) -> None:
        self.events.append(("ended", task.name, "finished" if is_finished else str(attempt.status)))

    def repeats(self, task: Any, attempt: Attempt) -> None:
        self.events.append(("repeats", task.name, attempt.last_line))

    def stopping(self, number: int, times: int, running: int) -> None:
        self.events.append(("stopping", signal.Signals(number).name, str(times), str(running)))

    def tick(self) -> None:
        if self._times and self._when and all(path.exists() for path in self._when):
            self._times -= 1
            assert self._signal is not None
            os.kill(os.getpid(), self._signal)


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles.commands.sweeps.run_queue.TICK_SECONDS", 0.05)


def slots_here(number: int) -> list[Slot]:
    return [Slot(HERE)] * number


def test_tasks_run_in_order_within_their_place(tmp_path: Path) -> None:
    core = frozenset({min(HERE)})
    tasks = [Command(tmp_path / str(i), [SAY]) for i in range(4)]
    heard = Heard()
    ended = RunQueue(tasks, [Slot(core, ("7", "x"))], heard).run()
    assert ended.finished == tasks and not ended.failed and ended.signal is None
    assert heard.events == [
        (what, str(i), *more) for i in range(4) for what, *more in (["started"], ["ended", "finished"])
    ]
    for task in tasks:
        lines = task.log.read_text().splitlines()
        assert lines[0].startswith("--- ") and lines[-2] == "hello"
        assert json.loads(lines[-1]) == [sorted(core), "7,x"]
        assert [(a.status, a.last_line) for a in task.attempts] == [(0, lines[-1])]
    assert frozenset(os.sched_getaffinity(0)) == HERE, "this process keeps its cores"


def test_two_places_work_at_the_same_time(tmp_path: Path) -> None:
    """Each waits until the other opens the same pipe, which only a task that runs alongside it can do."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    modes = {"writes": "w", "reads": "r"}
    tasks = [Command(tmp_path / name, [f"open({str(pipe)!r}, {mode!r}).close()"]) for name, mode in modes.items()]
    assert len(RunQueue(tasks, slots_here(2), Heard()).run().finished) == 2


def test_a_task_that_fails_is_tried_once_more(tmp_path: Path) -> None:
    task = Command(tmp_path / "once", [FAIL_ONCE, str(tmp_path / "tried")])
    heard = Heard()
    ended = RunQueue([task], slots_here(1), heard).run()
    assert ended.finished == [task]
    assert heard.events[1:] == [("repeats", "once", "it broke"), ("started", "once"), ("ended", "once", "finished")]
    assert [attempt.status for attempt in task.attempts] == [1, 0]
    assert task.attempts[1].last_line == "", "the last line of an attempt is its own"


def test_a_task_that_fails_twice_is_told_with_its_last_line_and_others_go_on(tmp_path: Path) -> None:
    bad = Command(tmp_path / "bad", ["import sys; print('x'); print('the reason \\n\\n'); sys.exit(3)"])
    wrong = Command(tmp_path / "wrong", ["import sys; sys.exit(2)"])
    killed = Command(tmp_path / "killed", ["import os; os.kill(os.getpid(), 9)"])
    early = Command(tmp_path / "early", ["pass"], ends=False)
    good = Command(tmp_path / "good", ["pass"])
    ended = RunQueue([bad, wrong, killed, early, good], slots_here(1), Heard()).run()
    assert ended.finished == [good]
    assert [(task.name, attempt.status) for task, attempt in ended.failed] == [
        ("bad", 3),
        ("wrong", 2),
        ("killed", -9),
        ("early", 0),
    ]
    assert ended.failed[0][1].last_line == "the reason"
    assert [len(task.attempts) for task in (bad, wrong, killed, early)] == [2, 1, 2, 2], "wrong flags stay wrong"


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_stops_the_running_tasks_and_starts_no_other(tmp_path: Path, number: signal.Signals) -> None:
    ready = [tmp_path / name for name in ("a", "b")]
    tasks = [Command(tmp_path / f"task-{path.name}", [WAIT, str(path)]) for path in ready]
    waiting = Command(tmp_path / "waiting", ["pass"])
    heard = Heard(number, ready)
    before = signal.getsignal(number)
    ended = RunQueue([*tasks, waiting], slots_here(2), heard).run()
    assert ended.signal == number and not ended.finished and not ended.failed, "stopped is not failed"
    assert ("stopping", number.name, "1", "2") in heard.events
    assert [task.attempts[0].status for task in tasks] == [143, 143]
    assert [task.attempts[0].last_line for task in tasks] == ["stopped by SIGTERM"] * 2
    assert not waiting.folder.exists()
    assert signal.getsignal(number) == before


def test_a_third_signal_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEAF", "1")
    task = Command(tmp_path / "deaf", [WAIT, str(tmp_path / "ready")])
    heard = Heard(signal.SIGINT, [tmp_path / "ready"], times=3)
    ended = RunQueue([task], slots_here(1), heard).run()
    assert [event[2] for event in heard.events if event[0] == "stopping"] == ["1", "2", "3"]
    assert task.attempts[0].status == -signal.SIGKILL and ended.signal == signal.SIGINT


def test_a_listener_that_fails_stops_the_tasks(tmp_path: Path) -> None:
    """As a closed pipe does: no process is left behind."""

    class Broken(Heard):
        def tick(self) -> None:
            if (tmp_path / "ready").exists():
                raise BrokenPipeError

    task = Command(tmp_path / "task", [WAIT, str(tmp_path / "ready")])
    with pytest.raises(BrokenPipeError):
        RunQueue([task], slots_here(1), Broken()).run()
    assert task.attempts[0].status == 143
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sweep")]


def test_a_command_that_cannot_be_started_ends_the_queue(tmp_path: Path) -> None:
    class Missing(Command):
        def command(self) -> list[str]:
            return [str(tmp_path / "no such program")]

    with pytest.raises(FileNotFoundError):
        RunQueue([Missing(tmp_path / "task", [])], slots_here(1), Heard()).run()
