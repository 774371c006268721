"""The sandbox's own process: ``python -I sandboxed.py``, with a request of ``sandbox.py`` as JSON on standard input.

It is three kinds of processes. The outermost moves into namespaces of its own (users, network, processes, IPC), counts
the processes and the memory below it, and answers. Its child is process 1 of the new namespace, so that everything ends
with it: it makes the file system read-only but for one small folder in memory, and starts the third, the program, once
per test, under rlimits and without privileges. Results are files that the program cannot see by name. Imports nothing
of miles.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

CHECK_SECONDS = 0.05  # between two looks at processes and memory
OUTPUT = 1 << 20  # bytes that a program may write to a file, its output included
FOLDER = 64 << 20  # bytes of its folder
OPEN_FILES = 64
INSIDE = 1000  # its user in the sandbox: not 0, so that starting a program drops every privilege
EPERM = 1

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x8, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 0x1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE = 1, 36, 38, 4

_libc = ctypes.CDLL(None, use_errno=True)

# Runs in the program's process: a test that calls a function, or that follows the program's text.
HARNESS = """
import json, os, sys
request = json.load(sys.stdin)
scope = {"__name__": "answer"}
exec(compile(request["program"], "answer.py", "exec"), scope)
if request["function"]:
    function = scope.get(request["function"])
    if function is None and "Solution" in scope:
        function = getattr(scope["Solution"](), request["function"])
    result = json.dumps(function(*request["arguments"]))
else:
    exec(compile(request["test"], "test.py", "exec"), scope)
    result = request["mark"]
os.write(request["result"], result.encode())
"""


def main() -> None:
    """Answer the request: ``{"runs": [...]}``, ``{"refused": why}`` or ``{"ended": why}``."""
    request = json.load(sys.stdin)
    if request["isolated"]:
        try:
            _unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWUTS)
        except OSError as error:
            _answer({"refused": f"new namespaces: {error.strerror}"})
            return
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(reader)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(_PR_SET_DUMPABLE, 0)  # the program must not read what is in this process
        try:
            reply = _run_all(request)
        except OSError as error:
            reply = {"refused": f"{error.strerror} ({error.filename})" if error.filename else str(error)}
        except BaseException:
            reply = {"ended": traceback.format_exc()[-500:]}
        with os.fdopen(writer, "w") as file:
            json.dump(reply, file)
        os._exit(0)
    os.close(writer)
    _answer(_watched(first, reader, request["processes"], request["memory"]))


def _watched(first: int, reader: int, processes: int, memory: int) -> dict[str, Any]:
    """Return the reply of process 1, or why it was ended."""
    top = psutil.Process(first)
    chunks = []
    while True:
        if select.select([reader], [], [], CHECK_SECONDS)[0]:
            chunk = os.read(reader, 1 << 20)
            if not chunk:
                break
            chunks.append(chunk)
            continue
        below = top.children(recursive=True)
        if len(below) > processes:
            return _ended(first, below, f"started more than {processes} processes")
        used = 0
        for process in below:
            with suppress(psutil.Error):
                info = process.memory_info()
                used += info.rss - info.shared
        if used > memory:
            return _ended(first, below, f"used more than {memory >> 20} MiB of memory")
    os.waitpid(first, 0)
    text = b"".join(chunks)
    reply: dict[str, Any] = json.loads(text) if text else {"ended": "ended its sandbox"}
    return reply


def _ended(first: int, below: list[psutil.Process], why: str) -> dict[str, Any]:
    os.kill(first, signal.SIGKILL)  # process 1 of a namespace takes all others with it
    for process in below:
        with suppress(psutil.Error):
            process.kill()
    os.waitpid(first, 0)
    return {"ended": why}


def _run_all(request: dict[str, Any]) -> dict[str, Any]:
    """Run the program once per test."""
    folder = request["folder"]
    if request["isolated"]:
        _close_file_system(folder)
    else:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    os.chdir(folder)
    return {"runs": [_run(request, test) for test in request["tests"]]}


def _run(request: dict[str, Any], test: dict[str, Any]) -> dict[str, Any]:
    """Run one test; return its exit status, output, result and the end of its errors, as text."""
    with (
        tempfile.TemporaryFile(dir=".") as given,
        tempfile.TemporaryFile(dir=".") as output,
        tempfile.TemporaryFile(dir=".") as errors,
        tempfile.TemporaryFile(dir=".") as result,
    ):
        if test["kind"] == "input":
            Path("answer.py").write_text(request["program"], encoding="utf-8", errors="replace")
            words, text = ["answer.py"], test["input"]
        else:
            words = ["-c", HARNESS]
            text = json.dumps({"program": request["program"], "result": result.fileno(), **test})
        given.write(text.encode("utf-8", "replace"))
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", *words],
            stdin=given,
            stdout=output,
            stderr=errors,
            env={"HOME": os.getcwd(), "TMPDIR": os.getcwd(), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            pass_fds=[result.fileno()],
            start_new_session=True,
            preexec_fn=_limits(request),
        )
        try:
            status: int | None = process.wait(request["wall_seconds"])
        except subprocess.TimeoutExpired:
            status = None
        _end_all(process)
        return {"status": status, "output": _text(output), "errors": _text(errors)[-500:], "result": _text(result)}


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """End whatever the program has started, and reap it."""
    if os.getpid() == 1:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # in a namespace of processes: all but this one
    else:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    process.returncode = 0  # reaped above


def _text(file: Any) -> str:
    file.seek(0)
    text: bytes = file.read(OUTPUT)
    return text.decode("utf-8", "replace")


def _limits(request: dict[str, Any]) -> Callable[[], None]:
    """Return what the program's process does before the program starts."""

    def limit() -> None:
        cpu = int(request["cpu_seconds"])
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        for kind, value in (
            (resource.RLIMIT_AS, request["memory"]),
            (resource.RLIMIT_FSIZE, OUTPUT),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (value, value))
        if request["isolated"]:  # outside a namespace it would count all processes of the user
            resource.setrlimit(resource.RLIMIT_NPROC, (request["processes"], request["processes"]))
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return limit


def _unshare(flags: int) -> None:
    """Move into new namespaces, as the user ``INSIDE``."""
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{INSIDE} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{INSIDE} {group} 1")


def _close_file_system(folder: str) -> None:
    """Make everything read-only but ``folder``, which becomes an empty one in memory; show no other processes."""
    if _libc.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "new mounts: " + os.strerror(ctypes.get_errno()))
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    changed = _libc.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    if changed != 0:
        raise OSError(ctypes.get_errno(), "read-only mounts: " + os.strerror(ctypes.get_errno()))
    quiet = _MS_NOSUID | _MS_NODEV
    _mount("tmpfs", folder, "tmpfs", quiet, f"size={FOLDER},mode=700")
    try:
        _mount("proc", "/proc", "proc", quiet | _MS_NOEXEC)
    except OSError as error:
        if error.errno != EPERM:  # a container hides parts of its /proc, and so forbids another one
            raise
        _mount("tmpfs", "/proc", "tmpfs", quiet, "size=4k")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    if _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target}: {os.strerror(ctypes.get_errno())}")


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _answer(reply: dict[str, Any]) -> None:
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main()
