"""Run a user's reward function: ``python -m miles.tasks.rewards.reward_worker MODULE:FUNCTION KEY BYTES FD FD``.

It is two processes. The worker imports the function and answers calls, many at once. The supervisor runs no user
code: it ends the worker, and every process that the worker has started, when the rollout process is gone, when they use
more memory than they may, or when the worker has lost the pipe of its calls or of its replies, which user code can
close. It reports how the worker ended by a pipe that user code never has.
"""

import json
import os
import pickle
import resource
import select
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from ctypes import CDLL
from pathlib import Path
from typing import Any, BinaryIO

import psutil

import miles
from miles.base.processes import die_with_parent, kill_all
from miles.base.stacks import answer_requests
from miles.base.text import few_lines, name_and_words, one_line
from miles.base.user_code import UserCall, UserCodeError, fault_of_signature, import_function, makes_coroutines
from miles.tasks.rewards.base import NotAReward, abbreviated, as_reward
from miles.tasks.rewards.pipe_messages import (
    PIPE_CLOSED,
    PIPE_READ,
    TOKEN_BYTES,
    NotAMessage,
    read_message,
    write_message,
)
from miles.tasks.rewards.sandboxed import uses_more

CHECK_SECONDS = 0.25  # between two looks at the memory
LONGEST_FAULT = 300
TRACEBACK_LINES = 40
_MILES = str(Path(miles.__file__).parent)
_PR_SET_CHILD_SUBREAPER = 36


def main(path: str, key: str, memory: int, watched: int, ending: int) -> None:
    """Start the worker and supervise it to its end, or until the other end of ``watched`` is closed.

    Standard input begins with the token of all messages. How the worker ended is written to ``ending``.
    """
    token = os.read(0, TOKEN_BYTES)
    pipes = _Pipes(os.dup(0), os.dup(1))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # user code may read standard input,
    os.dup2(2, 1)  # and its output goes to standard error, not among the replies
    CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # a process whose parent has died becomes the supervisor's child
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        die_with_parent(supervisor)
        os.close(ending)
        _work(pipes, token, path, key, memory)
        os._exit(0)
    os.close(pipes.requests)
    end = _supervise(worker, pipes, watched, memory)
    _end_descendants()
    if end is not None:
        with suppress(BrokenPipeError):
            os.write(ending, end.encode())


class _Pipes:
    """The pipes for calls to the worker: their file descriptors in it, and how to recognize them there."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests = requests
        self.replies = replies
        self._of = {fd: os.fstat(fd) for fd in (requests, replies)}

    def are_open(self) -> bool:
        """Return whether this process, the worker, still has them."""
        try:
            return all(os.path.samestat(os.fstat(fd), pipe) for fd, pipe in self._of.items())
        except OSError:
            return False

    def are_open_in(self, worker: int) -> bool:
        """Return whether the worker still has them, or is ending: its exit status then states how."""
        try:
            return all(os.path.samestat(os.stat(f"/proc/{worker}/fd/{fd}"), pipe) for fd, pipe in self._of.items())
        except FileNotFoundError:
            return not os.path.exists(f"/proc/{worker}/exe")  # a process that ends loses its program before its files
        except OSError:
            return True  # the kernel shows them to nobody, as of a process that may not be traced


def _supervise(worker: int, pipes: _Pipes, watched: int, memory: int) -> str | None:
    """Return how the worker ended, in words; None if the rollout process is gone."""
    poll = select.poll()
    poll.register(watched, 0)  # POLLHUP alone
    while True:
        if poll.poll(CHECK_SECONDS * 1000):
            return None
        for pid, status in _ended_children():
            if pid == worker:
                return _ending(os.waitstatus_to_exitcode(status))
        if memory and uses_more((process.pid for process in psutil.Process().children(recursive=True)), memory):
            os.kill(worker, signal.SIGKILL)
            return f"used more than {memory / 2**30:.3g} GiB of memory (--reward-memory) and was ended"
        if not pipes.are_open_in(worker):
            os.kill(worker, signal.SIGKILL)
            return PIPE_CLOSED


def _ended_children() -> list[tuple[int, int]]:
    ended = []
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(child)
    return ended


def _ending(code: int) -> str:
    if code < 0:
        return f"ended its process with {signal.Signals(-code).name}, a crash of the interpreter or a kill"
    return f"ended its process with exit code {code}, as os._exit does"


def _end_descendants() -> None:
    while children := psutil.Process().children(recursive=True):
        kill_all(children, 1.0)
        _ended_children()


def _work(pipes: _Pipes, token: bytes, path: str, key: str, memory: int) -> None:
    """Import the function, report that, and answer calls until the rollout process is gone."""
    answer_requests()
    writing = threading.Lock()
    requests, replies = os.fdopen(pipes.requests, "rb"), os.fdopen(pipes.replies, "wb")

    def reply(**message: Any) -> None:
        with writing, suppress(OSError):
            if not pipes.are_open():  # the number may belong to a file of the user's
                threading.Event().wait()  # for the supervisor, which ends this process
            write_message(replies, token, json.dumps(message).encode())

    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))  # too much memory raises MemoryError at once
    try:
        function = import_function(path, "--custom-rm-path")
    except ValueError as error:
        return reply(refused=few_lines(str(error)))
    except BaseException as error:  # whatever the module raises
        fault = one_line(name_and_words(error), LONGEST_FAULT)
        return reply(refused=f"--custom-rm-path {path}: its module raised {fault}; correct it")
    if (wrong := fault_of_signature(function, 1)) is not None:
        return reply(refused=f"--custom-rm-path {path}: {one_line(wrong, LONGEST_FAULT)} to take a list of samples")
    reply(ready=True, makes_coroutines=makes_coroutines(function))
    for request in _messages(requests, token, reply):
        number, samples = pickle.loads(request)
        call = UserCall(function, (samples,))

        def answer(outcome: Any, number: int = number, wanted: int = len(samples)) -> None:
            try:
                reply(number=number, rewards=rewards_of(outcome.result(), wanted, key))
            except BaseException as error:
                fault = (
                    str(error) if isinstance(error, ResultError | UserCodeError) else f"raised {name_and_words(error)}"
                )
                reply(number=number, fault=one_line(fault, LONGEST_FAULT), traceback=_traceback_of(error))

        call.outcome.add_done_callback(answer)


def _messages(requests: BinaryIO, token: bytes, reply: Callable[..., None]) -> Iterator[bytes]:
    """Yield the calls until no more can be read: the rollout process is gone, or user code has disturbed the pipe."""
    with suppress(OSError, NotAMessage):
        while (request := read_message(requests, token)) is not None:
            yield request
    reply(broken=PIPE_READ)
    threading.Event().wait()  # for the supervisor, which ends this process


def _traceback_of(error: BaseException) -> str:
    """Return the traceback of the error in the user's code, without frames of miles and of installed packages."""
    if isinstance(error, ResultError):
        return ""
    try:
        raised = error.__cause__ if isinstance(error, UserCodeError) and error.__cause__ is not None else error
        whole = traceback.TracebackException.from_exception(raised, compact=True)
        whole.stack = traceback.StackSummary.from_list([frame for frame in whole.stack if _is_users(frame.filename)])
        return few_lines("".join(whole.format(chain=False)), lines=TRACEBACK_LINES, limit=LONGEST_FAULT)
    except Exception:  # its frames or words are the user's, and long ones may not fit into the memory
        return f"(its traceback cannot be shown: {type(error).__name__})"


def _is_users(file: str) -> bool:
    return not file.startswith((_MILES, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen"))


class ResultError(Exception):
    """The function returned something other than one result per sample."""


def rewards_of(results: Any, wanted: int, key: str) -> list[float | str]:
    """Return the number of each result, or its fault. ``key`` is the value of ``--reward-key``, or empty.

    Raises:
        ResultError: There is not one result per sample.
    """
    if isinstance(results, str | bytes | Mapping) or not hasattr(results, "__len__"):
        raise ResultError(f"returned {abbreviated(results)}; return a list, one number per sample")
    if len(results) != wanted:
        raise ResultError(f"returned {len(results)} rewards for {wanted} samples; return one per sample")
    return [_reward(result, key) for result in results]


def _reward(result: Any, key: str) -> float | str:
    if isinstance(result, NotAReward):
        return result
    if key:
        if not isinstance(result, Mapping):
            return f"returned {abbreviated(result)}, not an object with the key {key} of --reward-key"
        if key not in result:
            return f"returned an object without the key {key} of --reward-key; it has {abbreviated(list(result))}"
        result = result[key]
    return as_reward(result)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
