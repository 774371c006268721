"""The report of a hang: what each process of a run was doing when a wait exceeded its limit.

Workers are asked through Ray, on a thread that their work leaves free. Processes of this machine that do not answer,
and those that are no workers (engines, reward functions), are asked by a signal (miles/base/stacks.py). Others, such as
SGLang's schedulers, are shown by py-spy if it is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from miles.base.stacks import frames, own_stacks, request_stacks
from miles.run.liveness import Workers
from miles.run.run_guard import members

ANSWER_SECONDS = 5.0
PY_SPY_SECONDS = 20.0  # for all processes together
LOG_LINES = 30
LOG_BYTES = 200_000
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_LIBRARIES = ("site-packages", "/lib/python3")
_ASIDE = ("heartbeat", "describe", "own_stacks")  # functions that run beside the work
_NO_PYTHON = ("raylet", "gcs_server")


def hang_report(why: str, workers: Workers | None, run_folder: Path | None, output_dir: Path) -> str:
    """Return the report.

    Args:
        why: Which wait has exceeded its limit.
        workers: The workers of the run; None if they cannot be asked.
        run_folder: The temporary folder of a run on one machine; None in a joined cluster.
        output_dir: ``--output-dir``, with the logs of servers in it.
    """
    processes = [] if run_folder is None else members(str(run_folder))
    states = {process.pid: _state(process) for process in processes}  # before anything is asked, which may wake it
    pids = {} if workers is None else workers.pids()
    answers = {} if workers is None else workers.describe(ANSWER_SECONDS)
    silent = [pid for pid in states if pids.get(pid) not in answers]
    stacks = {} if run_folder is None else request_stacks(run_folder, silent, ANSWER_SECONDS)
    found = [_Process("the launcher", os.getpid(), "which writes this", own_stacks())]
    for pid, state in states.items():
        name = pids.get(pid)
        found.append(_Process(name or _program(pid), pid, state, answers.get(name or "") or stacks.get(pid, "")))
    for pid, name in pids.items():
        if pid not in states:
            found.append(_Process(name, pid, "on another machine", answers.get(name, "")))
    lines = [
        f"Hang report of {output_dir}, {time.strftime('%Y-%m-%d %H:%M:%S')}",
        f"Why: {why}",
        "",
        "== Who waits for what",
        *(f"{process}: {_doing(process.stacks)}" for process in found),
    ]
    until = time.monotonic() + PY_SPY_SECONDS
    for process in found:
        lines += ["", f"== {process}", process.stacks.strip() or _by_py_spy(process, until) or "no Python stack"]
    for path in sorted((output_dir / "engines").glob("*.log")):
        lines += ["", f"== the last lines of {path}", *_last_lines(path)]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Process:
    """A process of the run, its state in words, and its stacks; empty if it has shown none."""

    name: str
    pid: int
    state: str
    stacks: str

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid}, {self.state})"


def collective_in(stacks: str) -> str | None:
    """Return the collective operation that a thread of a process is in, and the code of miles that called it."""
    for thread in frames(stacks):
        names = [name for file, _, name in thread if file.endswith(_COLLECTIVES)]
        if names:
            callers = (f"{_short(file)}:{line} in {name}" for file, line, name in thread if "/miles/" in file)
            caller = next(callers, None)
            return names[0] + ("" if caller is None else f", called at {caller}")
    return None


def _doing(stacks: str) -> str:
    if not stacks:
        return "no Python stack"
    if (collective := collective_in(stacks)) is not None:
        return f"in the collective {collective}"
    own = (
        f"at {_short(file)}:{line} in {name}"
        for thread in reversed(frames(stacks))  # the main thread is the last
        for file, line, name in thread
        if not file.startswith("<") and not any(part in file for part in _LIBRARIES) and name not in _ASIDE
    )
    return next(own, "in no code of miles or of the user")


def _short(file: str) -> str:
    before, found, after = file.rpartition("/miles/")
    return f"miles/{after}" if found else file


def _state(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        times = process.cpu_times()
        return f"{process.status()}, {times.user + times.system:.0f} s of CPU, {process.num_threads()} threads"
    return "ended"


def _program(pid: int) -> str:
    with suppress(psutil.Error):
        words = psutil.Process(pid).cmdline()
        if "-m" in words[:-1]:
            return str(words[words.index("-m") + 1])
        return Path(words[0].split()[0]).name if words else psutil.Process(pid).name()
    return "a process"


def _by_py_spy(process: _Process, until: float) -> str:
    """Return the stacks of a process that py-spy shows; nothing if it is not installed or may not look, or too late."""
    program = shutil.which("py-spy")
    left = until - time.monotonic()
    if program is None or process.name in _NO_PYTHON or left <= 0:
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        command = [program, "dump", "--nonblocking", "--pid", str(process.pid)]
        return str(subprocess.run(command, capture_output=True, text=True, timeout=left).stdout)
    return ""


def _last_lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            yield from file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    except OSError as error:
        yield f"cannot be read ({error.strerror})"
