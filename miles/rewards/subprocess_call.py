"""Calls that may hang or crash, made in child processes that die for it.

Symbolic algebra on what a model wrote need not end (``9^{9^{9^9}}``), sits in C code that no Python signal interrupts,
and some scorers ``eval`` their input. Such a call is made in a child process under a kernel timer, whose SIGALRM kills
the child at any point. This protects the run from hangs and crashes; it is not a jail against hostile code.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

MAX_CHILDREN = 4


class SubprocessCallTimeout(Exception):
    """The call took longer than it may."""


def subprocess_call(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """``function(*args)`` from a pool of at most ``MAX_CHILDREN`` child processes; blocks, and may run in any thread.

    ``function`` is a top-level function; it, ``args`` and the result must pickle. Raises what ``function`` raises,
    ``SubprocessCallTimeout`` after ``seconds`` of wall time, and ``RuntimeError`` if the child dies another way. The
    time starts once the child has imported the function's module.
    """
    child = _idle.get() or _Child()  # waits while all are busy
    try:
        return child.call(function, args, seconds)
    finally:
        _idle.put(child if child.alive else None)


class _Child:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
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
            raised, value = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            code = self._end()
            if code == -signal.SIGALRM:
                raise SubprocessCallTimeout(f"{function.__name__} took more than {seconds:g} s") from None
            raise RuntimeError(f"the process that ran {function.__name__} died with exit code {code}") from None
        if raised:
            raise value
        return value

    def _end(self) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdout.close()
        with suppress(BrokenPipeError):  # what it had not read died with it
            self._process.stdin.close()
        return self._process.wait()


# The last child that became idle is taken first, so a light load runs on one. None stands for one not started.
_idle: queue.LifoQueue[_Child | None] = queue.LifoQueue()
for _ in range(MAX_CHILDREN):
    _idle.put(None)


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until the parent closes the pipe."""
    while True:
        try:
            seconds, function, args = pickle.load(requests)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM has its default action: the end
        try:
            reply = (False, function(*args))
        except Exception as error:
            reply = (True, error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(_pickled(reply))
        replies.flush()


def _pickled(reply: tuple[bool, Any]) -> bytes:
    try:
        data = pickle.dumps(reply)
        pickle.loads(data)  # an exception whose constructor wants more than its message fails here only
    except Exception as error:
        fault = f"{type(reply[1]).__name__} {reply[1]!s:.200} (cannot be sent between processes: {error})"
        return pickle.dumps((True, RuntimeError(fault)))
    return data


if __name__ == "__main__":
    own_replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a scorer prints goes to standard error, not among the replies
    _serve(sys.stdin.buffer, own_replies)
