"""Make calls that may hang or crash in child processes, which can be killed.

Symbolic algebra on model output need not end (``9^{9^{9^9}}``), sits in C code that no Python signal interrupts, and
some scorers ``eval`` their input. Such a call is made in a child process under two kernel timers, whose signals kill
the child at any point, and under a limit on its memory. The first timer counts processor time, so that a busy machine
does not end calls that need little; the second bounds calls that wait. This protects the run from hangs and crashes; it
is not a jail against hostile code.

Importing a scorer's libraries takes a second or more. So a process imports them once, and forks a worker that answers
calls; when the worker dies, it forks the next one.

A pool of pebble 5.2 does not carry this: a process that the system refuses to start breaks all calls in progress, and
it counts wall time only.
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any, BinaryIO, TypeVar

from miles.base.processes import same_imports

T = TypeVar("T")
R = TypeVar("R")

MAX_CHILDREN = 4
MEMORY = 2 << 30  # bytes that a call may allocate
WALL_SECONDS = 8.0  # of wall time per second of processor time that a call may take

_RETURNED, _RAISED, _DIED = range(3)


class SubprocessCallTimeout(Exception):
    """The call took longer than it may."""


class SubprocessDied(Exception):
    """The process of the call ended before it returned."""


def subprocess_call(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """Call ``function(*args)`` in one of at most ``MAX_CHILDREN`` child processes; blocks, and may run in any thread.

    ``function`` is a top-level function; it, ``args`` and the result must pickle. Raises the errors of ``function``,
    ``SubprocessCallTimeout`` after ``seconds`` of processor time or ``WALL_SECONDS`` times as many of wall time, and
    ``SubprocessDied`` if the process ends another way. The time starts once the child has imported the function's
    module with its ``SLOW_IMPORTS``, and called its ``warm_up`` if it has one.
    """
    child = _idle.get()  # waits while all are busy
    try:
        if child is None:
            child = _Child(function.__module__)
        return child.call(function, args, seconds)
    finally:
        _idle.put(child if child is not None and child.alive else None)


def in_parallel(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return ``function`` of each item, for functions that spend their time in ``subprocess_call``."""
    with ThreadPoolExecutor(MAX_CHILDREN, thread_name_prefix="scorer") as threads:
        return list(threads.map(function, items))


class _Child:
    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=same_imports(),
            start_new_session=True,  # Ctrl-C reaches the parent alone; the child ends with its standard input
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        request = pickle.dumps((seconds, function, args))
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
            outcome, value = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self._end()
            raise SubprocessDied(f"the processes that run {function.__name__} have died") from None
        if outcome == _DIED:
            if value in (-signal.SIGPROF, -signal.SIGALRM):
                raise SubprocessCallTimeout(f"{function.__name__} took more than {seconds:g} s")
            raise SubprocessDied(f"the process that ran {function.__name__} died with exit code {value}")
        if outcome == _RAISED:
            raise value
        return value

    def _end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.stdout.close()
        with suppress(BrokenPipeError):  # input that it had not read died with it
            self._process.stdin.close()
        self._process.wait()


# The last child that became idle is taken first, so a light load runs on one. None is one not started.
_idle: queue.LifoQueue[_Child | None] = queue.LifoQueue()
for _ in range(MAX_CHILDREN):
    _idle.put(None)


def _fork_workers(module: str, replies: BinaryIO) -> None:
    """Import ``module``, and have one worker after another answer requests until the parent closes the pipe."""
    with suppress(Exception):  # the worker imports them again, and reports the error
        _import_with_libraries(module)
    while True:
        worker = os.fork()
        if worker == 0:
            _serve(os.fdopen(os.dup(0), "rb"), replies)
            os._exit(0)
        _, status = os.waitpid(worker, 0)
        if _is_closed(0):
            return
        replies.write(pickle.dumps((_DIED, os.waitstatus_to_exitcode(status))))
        replies.flush()


@cache
def _import_with_libraries(name: str) -> None:
    module = importlib.import_module(name)
    for slow in getattr(module, "SLOW_IMPORTS", ()):
        importlib.import_module(slow)
    if hasattr(module, "warm_up"):
        module.warm_up()


def _is_closed(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until the parent closes the pipe."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    while True:
        try:
            seconds, function, args = pickle.load(requests)
        except EOFError:
            return
        try:
            _import_with_libraries(function.__module__)
            limit_time(seconds)
            reply = (_RETURNED, function(*args))
        except Exception as error:
            reply = (_RAISED, error)
        limit_time(0)
        replies.write(_pickled(reply))
        replies.flush()


def limit_time(seconds: float) -> None:
    """End this process after so many more seconds of processor time (0: never), or ``WALL_SECONDS`` times as many.

    A function that ``subprocess_call`` calls may call it to start its time again. Signals have their default action.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS * seconds)


def _pickled(reply: tuple[int, Any]) -> bytes:
    try:
        data = pickle.dumps(reply)
        pickle.loads(data)  # an exception whose constructor wants more than its message fails here only
    except Exception as error:
        fault = f"{type(reply[1]).__name__} {reply[1]!s:.200} (cannot be sent between processes: {error})"
        return pickle.dumps((_RAISED, RuntimeError(fault)))
    return data


if __name__ == "__main__":
    own_replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a scorer's output goes to standard error, not among the replies
    _fork_workers(sys.argv[1], own_replies)
