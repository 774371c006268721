"""Run Python programs that a model wrote, each in its own processes (``sandboxed.py``).

With namespaces, a program has no network and sees no other processes. It sees an empty folder and, read-only, the
interpreter, its packages and the system's libraries, with the sockets and FIFOs that may lie there, but no other files.
Whatever it starts ends with it. In any case its processor time, wall time, memory, output, open files and processes are
limited, and the kernel refuses calls that make it keep memory that no process shows. Without namespaces, a process that
keeps out of sight between two looks at them may outlive its program, and files and sockets may hold more. This bounds
mistakes and mischief; the kernel is shared with it.

Bubblewrap does not carry this: it limits no inodes of a folder, leaves /proc/sys writable for root, fails in containers
that hide parts of /proc, and starts again for each empty folder.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.base.processes import end
from miles.base.text import one_line
from miles.tasks.rewards.subprocess_call import MAX_CHILDREN, WALL_SECONDS

_START_SECONDS = 30.0  # of wall time, for the processes around the program
_END_SECONDS = 5.0  # of wall time, for them to end the rest of it
_slots = threading.BoundedSemaphore(MAX_CHILDREN)  # sandboxes at once


class SandboxRefused(Exception):
    """The kernel does not permit the namespaces; the message states which."""


@dataclass(frozen=True)
class Limits:
    """The resources that a program may use, per test.

    Attributes:
        seconds: Processor time of its processes together; ``WALL_SECONDS`` times as many of wall time. N tests together
            may take N + ``WALL_SECONDS`` times as many of wall time.
        memory: Bytes, over all its processes, with their page tables and buffers; a quarter more in its folder.
        processes: Processes and threads at once.
        file_bytes: Bytes that it may write to a file, such as its output.
    """

    seconds: int = 4
    memory: int = 1 << 30
    processes: int = 16
    file_bytes: int = 1 << 20


@dataclass(frozen=True)
class CodeTest:
    """One run of a program. Give ``stdin``, or ``function``, or ``code``.

    Attributes:
        stdin: The program is run as a script, with this as its standard input; the result is its output.
        function: This function of the program, or of its class ``Solution``, is called; the result is JSON.
        arguments: Its arguments, as JSON values.
        code: Statements that follow the program, such as ``assert f(2) == 4``; the result is empty.
    """

    stdin: str | None = None
    function: str = ""
    arguments: Sequence[Any] = ()
    code: str = ""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test: ``result``, or the fault."""

    result: str | None
    fault: str = ""


def run_tests(
    program: str,
    tests: Sequence[CodeTest],
    limits: Limits,
    *,
    isolated: bool,
    prelude: str = "",
    goes_on: Callable[[int, Outcome], bool] = lambda place, outcome: True,
) -> list[Outcome]:
    """Run ``program`` once per test and return the outcomes in order.

    Args:
        program: The text of a Python program.
        tests: The tests. Statements (``code``) run in the program's own process, which could forge their success.
        limits: The resources that each may use.
        isolated: In its own namespaces.
        prelude: Import statements; their names are built-in names of the program.
        goes_on: Whether further tests are wanted, given the index of a test and its outcome; if not, it is the last.

    Raises:
        SandboxRefused: The kernel does not permit the namespaces.
    """
    marks = [secrets.token_hex(16) for _ in tests]
    outcomes: list[Outcome] = []
    with _slots, tempfile.TemporaryDirectory(prefix="miles-sandbox-") as folder:
        request = {
            "program": program.encode("utf-8", "replace").decode(),
            "prelude": prelude,
            "tests": [_request(test, mark) for test, mark in zip(tests, marks, strict=True)],
            "isolated": isolated,
            "folder": folder,
            "cpu_seconds": limits.seconds,
            "wall_seconds": limits.seconds * WALL_SECONDS,
            "memory": limits.memory,
            "processes": limits.processes,
            "file_bytes": limits.file_bytes,
        }
        seconds = _START_SECONDS + (WALL_SECONDS + len(tests)) * limits.seconds
        with closing(_replies(json.dumps(request), seconds)) as replies:
            while len(outcomes) < len(tests):
                reply = next(replies)
                place = len(outcomes)
                if "refused" in reply:
                    raise SandboxRefused(reply["refused"])
                if "ended" in reply:
                    return outcomes + [Outcome(None, one_line(reply["ended"], 300))] * (len(tests) - place)
                outcomes.append(_outcome(reply["run"], tests[place], marks[place]))
                if not goes_on(place, outcomes[-1]):
                    break
    return outcomes


def _request(test: CodeTest, mark: str) -> dict[str, Any]:
    if test.stdin is not None:
        return {"kind": "input", "input": test.stdin}
    if test.function:
        return {"kind": "call", "function": test.function, "arguments": list(test.arguments)}
    return {"kind": "code", "function": "", "test": test.code, "mark": mark}


def _replies(request: str, seconds: float) -> Generator[dict[str, Any]]:
    """Yield the sandbox's answers; in the end, ``{"ended": why}``."""
    late = threading.Event()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("sandboxed.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None

        def end_late() -> None:
            late.set()
            end(process, _END_SECONDS)

        timer = threading.Timer(seconds, end_late)
        timer.start()
        try:
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(request)
            for line in process.stdout:
                if line.endswith("\n"):
                    yield json.loads(line)
            code = process.wait()
            errors.seek(0)
            last = errors.read()[-200:].decode("utf-8", "replace")
            how = f"its sandbox ended with exit code {code}: {one_line(last, 200)}"
            yield {"ended": f"took more than {seconds:g} s for its tests" if late.is_set() else how}
        finally:
            timer.cancel()
            timer.join()
            end(process, _END_SECONDS)  # if killed, process 1 of the namespace ends with it, and all others with that
            process.stdout.close()


def _outcome(run: dict[str, Any], test: CodeTest, mark: str) -> Outcome:
    if run["status"] is None:
        return Outcome(None, "took too long")
    if run["status"] != 0:
        last = (run["errors"].strip().splitlines() or [""])[-1]
        return Outcome(None, one_line(f"exit code {run['status']} {last}", 200))
    if test.stdin is not None:
        return Outcome(run["output"])
    if test.function:
        return Outcome(run["result"]) if run["result"] else Outcome(None, "ended before the function returned")
    return Outcome("") if run["result"] == mark else Outcome(None, "ended before the test did")
