"""A user's reward function in a separate process, so that nothing it does can stop, fill or end the rollout process.

There is one process for all calls: a function may keep a client, a cache or a model. It is replaced when it dies, when
a call does not return in time (Python cannot stop a thread), and when it uses too much memory.

The way of a call: ``scoring.score`` awaits ``RewardProcess``, which has ``_Worker.call`` send the samples. The process
(``reward_worker``) reads them, calls the function in a thread and writes its rewards. ``_Worker._read_replies`` reads
those, and gives them to the call that waits. Both processes write and read with ``pipe_messages``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from asyncio import Lock
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from miles.base.processes import RUN_FOLDER, same_imports
from miles.base.stacks import frames, request_stacks
from miles.base.text import InputError, one_line
from miles.base.threads import in_thread
from miles.base.user_code import UserCodeError, UserCodeTimeout, call_slots
from miles.tasks.rewards.base import NotAReward
from miles.tasks.rewards.pipe_messages import PIPE_WRITTEN, NotAMessage, new_token, read_message, write_message
from miles.types.sample import Sample

MOST_TIMEOUTS = 10  # one after another, without a call that returns: it is stuck, not slow
IMPORT_SECONDS = 600.0  # for importing the function's module, which may load a model
REMINDER_SECONDS = 30.0  # between two messages that it is still importing
MAX_RESUBMISSIONS = 3  # of a call that was stopped because another one did not return
OUTPUT_PER_MINUTE = 100_000  # bytes of the function's output that are shown
LONGEST_LINE = 500
STACK_SECONDS = 5.0  # for the stacks of a function that does not return
_logger = logging.getLogger(__name__)
_NOT_THE_USERS = ("site-packages", "/lib/python3", "/miles/")


class RewardProcessDied(Exception):
    """The process of the reward function ended during the call, or before it; the message states how.

    Attributes:
        only_call: Whether no other call can be to blame.
    """

    def __init__(self, end: str, *, only_call: bool = False) -> None:
        super().__init__(end)
        self.only_call = only_call


class RewardStuck(UserCodeTimeout):
    """No call has returned for ``MOST_TIMEOUTS`` times the longest time of a call."""


class RewardProcess:
    """A reward function, ``module:function``, that is called in its own process.

    The results are numbers, or ``NotAReward``. Calls raise ``UserCodeError`` with the function's error,
    ``UserCodeTimeout`` (``RewardStuck`` if no call returns any more), and ``RewardProcessDied``. If the process dies
    during several calls, each of them is made again alone, to find the one that ends it.

    Args:
        path: ``--custom-rm-path``.
        key: ``--reward-key``, or None.
        seconds: The longest time of a call; 0 is no limit.
        memory: The bytes that its processes may use together; 0 is no limit.

    Raises:
        InputError: The function cannot be imported.
    """

    def __init__(self, path: str, key: str | None, seconds: float, memory: int) -> None:
        self.reward_name = path
        self._command = [path, key or "", str(memory)]
        self._seconds = seconds
        self._shared = _Worker(self._command)
        self._replacing = threading.Lock()
        self._timeouts = 0  # one after another; those at the same time count once
        self._last_timeout = 0.0
        self._alone = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Lock]()

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Return one result per sample."""
        async with call_slots(self._shared.makes_coroutines):
            for _ in range(MAX_RESUBMISSIONS):
                worker = await self._living_worker()
                try:
                    return await self._call(worker, samples)
                except RewardProcessDied as death:
                    if death.only_call:
                        raise
                    if not worker.stopped:
                        break  # any of the calls may have ended it
        async with self._alone.setdefault(asyncio.get_running_loop(), Lock()):
            alone = await in_thread(_Worker, self._command)
            try:
                return await self._call(alone, samples)
            finally:
                alone.stop()

    async def _call(self, worker: _Worker, samples: Sequence[Sample]) -> list[float]:
        began = time.monotonic()
        try:
            results = await worker.call(samples, self._seconds)
        except UserCodeTimeout as error:
            if began >= self._last_timeout:
                self._timeouts += 1
                self._last_timeout = time.monotonic()
            if self._timeouts < MOST_TIMEOUTS:
                raise
            raise RewardStuck(f"{error}, {self._timeouts} times in a row, and no other call returned") from None
        except UserCodeError:
            self._timeouts = 0
            raise
        self._timeouts = 0
        return results

    def __del__(self) -> None:
        if hasattr(self, "_shared"):
            self._shared.stop()

    async def _living_worker(self) -> _Worker:
        if not self._shared.alive:
            await in_thread(self._replace_dead_worker)
        return self._shared

    def _replace_dead_worker(self) -> None:
        with self._replacing:  # all calls that the last one had ask for the next one at the same time
            if not self._shared.alive:
                self._shared = _Worker(self._command)


class _Worker:
    """One life of the process, and the calls that it has not answered."""

    def __init__(self, command: list[str]) -> None:
        # The supervisor ends when this process closes its end, or dies.
        watched, held = os.pipe()
        self._held: int | None = held
        self._ending, ending = os.pipe()
        self._token = new_token()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "miles.tasks.rewards.reward_worker", *command, str(watched), str(ending)],
            pass_fds=[watched, ending],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=same_imports(),
            start_new_session=True,  # Ctrl-C reaches the launcher alone; this ends with its standard input
        )
        os.close(watched)
        os.close(ending)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the reader of replies reports that it has ended
            self._process.stdin.write(self._token)
            self._process.stdin.flush()
        self._numbers = count()
        self._pending: dict[int, Future[list[float]]] = {}
        self._state = threading.Lock()  # of _pending, alive and _held
        self._writing = threading.Lock()
        self.alive = True
        self.stopped = False  # by this process
        self.makes_coroutines = False  # the function, once it is imported
        self._ready: Future[None] = Future()
        threading.Thread(target=self._read_replies, name="reward-replies", daemon=True).start()
        threading.Thread(target=self._show_output, name="reward-output", daemon=True).start()
        self._wait_for_import(f"--custom-rm-path {command[0]}")

    def _wait_for_import(self, name: str) -> None:
        began = time.monotonic()
        while not self._ready.done():
            seconds = time.monotonic() - began
            if seconds > IMPORT_SECONDS:
                self.stop()
                raise InputError(
                    f"{name}: importing its module takes more than {IMPORT_SECONDS:g} s; do less at import, such as at "
                    f"the first call"
                )
            if seconds > REMINDER_SECONDS:
                _logger.warning("%s: its module has been importing for %.0f s", name, seconds)
            futures.wait([self._ready], timeout=REMINDER_SECONDS)
        try:
            self._ready.result()
        except RewardProcessDied as error:
            raise InputError(f"{name}: importing its module {error}; correct it") from None

    async def call(self, samples: Sequence[Sample], seconds: float) -> list[float]:
        number = next(self._numbers)
        result: Future[list[float]] = Future()
        with self._state:
            if not self.alive:
                raise RewardProcessDied("ended its process")
            self._pending[number] = result
        try:
            async with asyncio.timeout(seconds or None):
                # In a thread: a function that holds Python's lock keeps its process from reading.
                await in_thread(self._send, pickle.dumps((number, list(samples))))
                return await asyncio.wrap_future(result)
        except TimeoutError:
            place = await in_thread(self._place)
            self.stop()
            raise UserCodeTimeout(f"did not return within {seconds:g} s{place}") from None
        finally:
            with self._state:
                self._pending.pop(number, None)

    def _place(self) -> str:
        """Return the line that the function has reached, as the end of a sentence; nothing if no thread is in it."""
        folder = os.environ.get(RUN_FOLDER)
        if folder is None:
            return ""
        with suppress(psutil.Error):
            workers = [child.pid for child in psutil.Process(self._process.pid).children()]
            for text in request_stacks(Path(folder), workers, STACK_SECONDS).values():
                for file, line, name in (frame for thread in frames(text) for frame in thread):
                    if not file.startswith("<") and not any(part in file for part in _NOT_THE_USERS):
                        return f"; it was at {Path(file).name}:{line} in {name}"
        return ""

    def stop(self) -> None:
        """End the process and all that it has started. Calls in progress raise ``RewardProcessDied``."""
        self.stopped = True
        self._let_go()

    def _let_go(self) -> None:
        with self._state:
            self.alive = False
            held, self._held = self._held, None
        if held is not None:
            os.close(held)

    def _send(self, message: bytes) -> None:
        assert self._process.stdin is not None
        with self._writing, suppress(BrokenPipeError, ValueError):  # ended meanwhile: the reader of replies reports it
            write_message(self._process.stdin, self._token, message)

    def _read_replies(self) -> None:
        broken = self._read_to_end()
        if broken:
            self._let_go()
        with os.fdopen(self._ending, "rb") as ending:
            end = ending.read().decode() or broken or "ended its process"
        with self._state:
            self.alive = False
            left, self._pending = self._pending, {}
        for future in left.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(RewardProcessDied(end, only_call=len(left) == 1 and not self.stopped))
        if not self._ready.done():
            self._ready.set_exception(RewardProcessDied(end))
        self._process.wait()
        self._let_go()

    def _read_to_end(self) -> str:
        """Take the replies until there are no more; return why no more can be read, if the function is to blame."""
        assert self._process.stdout is not None
        try:
            while (message := read_message(self._process.stdout, self._token)) is not None:
                reply = json.loads(message)
                if "broken" in reply:
                    return str(reply["broken"])
                if "ready" in reply:
                    self.makes_coroutines = reply["makes_coroutines"]
                    self._ready.set_result(None)
                elif "refused" in reply:
                    self._ready.set_exception(InputError(reply["refused"]))
                else:
                    self._settle(reply)
        except NotAMessage:
            return PIPE_WRITTEN
        return ""

    def _settle(self, reply: dict[str, Any]) -> None:
        with self._state:
            future = self._pending.pop(reply["number"], None)
        if future is None or not future.set_running_or_notify_cancel():
            return  # nobody waits any more
        if "fault" in reply:
            error = UserCodeError(reply["fault"])
            if reply["traceback"]:
                error.add_note(reply["traceback"])
            future.set_exception(error)
        else:
            results: list[Any] = [NotAReward(r) if isinstance(r, str) else r for r in reply["rewards"]]
            future.set_result(results)

    def _show_output(self) -> None:
        """Show the function's output, line by line and without control characters, up to a limit per minute."""
        assert self._process.stderr is not None
        printed = left_out = 0
        minute = time.monotonic()
        rest = b""
        while chunk := os.read(self._process.stderr.fileno(), 1 << 16):
            if time.monotonic() - minute > 60:
                minute = time.monotonic()
                printed = 0
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > 1 << 16:
                lines, rest = [*lines, rest], b""
            for line in lines:
                if printed + len(line) > OUTPUT_PER_MINUTE:
                    left_out += len(line)
                    continue
                printed += len(line) + 1
                print("reward:", one_line(line.decode(errors="replace"), LONGEST_LINE), file=sys.stderr)
        if rest:
            print("reward:", one_line(rest.decode(errors="replace"), LONGEST_LINE), file=sys.stderr)
        if left_out:
            print(f"reward: {left_out} more bytes of its output are not shown", file=sys.stderr)
