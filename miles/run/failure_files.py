"""The folder of a failure: ``failure-TIME/`` in the output folder, made when something is to be kept.

It has the report of a hang, and the ends of Ray's logs, whose own folder is removed with the run.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from miles.base.secrets import SHORTEST_HIDDEN_IN_TEXT, hide_in_text, secrets_in
from miles.base.stacks import frames, own_stacks, request_stacks
from miles.base.text import tell
from miles.run.liveness import Workers, end_of
from miles.run.run_guard import members

# The report of a hang: the stacks of each process of a run when a wait exceeded its limit.
#
# Workers are asked through Ray, on a thread that their work leaves free. Processes of this machine that do not answer,
# and those that are no workers (engines, reward functions), are asked by a signal (miles/base/stacks.py). Others,
# such as SGLang's schedulers, are shown by py-spy if it is installed.


ANSWER_SECONDS = 5.0
PY_SPY_SECONDS = 20.0  # for all processes together
LOG_LINES = 30
LOG_BYTES = 200_000
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_LIBRARIES = ("site-packages", "/lib/python3")
_ASIDE = ("heartbeat", "describe", "own_stacks")  # functions that run alongside the work
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
    entries = [_Process("the launcher", os.getpid(), "which writes this", own_stacks())]
    for pid, state in states.items():
        name = pids.get(pid)
        entries.append(_Process(name or _program(pid), pid, state, answers.get(name or "") or stacks.get(pid, "")))
    for pid, name in pids.items():
        if pid not in states:
            entries.append(_Process(name, pid, "on another machine", answers.get(name, "")))
    lines = [
        f"Hang report of {output_dir}, {time.strftime('%Y-%m-%d %H:%M:%S')}",
        f"Why: {why}",
        "",
        "== Who waits for what",
        *(f"{process}: {_doing(process.stacks)}" for process in entries),
    ]
    until = time.monotonic() + PY_SPY_SECONDS
    for process in entries:
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
    places = (
        f"at {_short(file)}:{line} in {name}"
        for thread in reversed(frames(stacks))  # the main thread is the last
        for file, line, name in thread
        if not file.startswith("<") and not any(part in file for part in _LIBRARIES) and name not in _ASIDE
    )
    return next(places, "in no code of miles or of the user")


def _short(file: str) -> str:
    before, separator, after = file.rpartition("/miles/")
    return f"miles/{after}" if separator else file


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
        yield from end_of(path, LOG_BYTES).decode(errors="replace").splitlines()[-LOG_LINES:]
    except OSError as error:
        yield f"cannot be read ({error.strerror})"


MOST_FOLDERS = 5  # in an output folder, the newest
HANG_REPORT = "hang_report.txt"
RAY_LOGS = "ray_logs"
FILE_BYTES = 1_000_000  # the end of each of Ray's logs
TOTAL_BYTES = 20_000_000  # of them together
# Beginnings of their names; those that say most about a death come first.
_ORDER = ("raylet", "gcs_server", "worker-", "python-core-worker", "python-core-driver")
_FOLDER = re.compile(r"failure-\d{8}-\d{6}")


class FailureFiles:
    """Keep the files that explain the failure of a run, without its secrets, readable by its user only.

    Args:
        output_dir: ``--output-dir``.
        secrets: Texts that are hidden in the files, besides the credentials in the environment.
    """

    def __init__(self, output_dir: Path, secrets: Collection[str]) -> None:
        self._output_dir = output_dir
        self._secrets = secrets
        self._folder: Path | None = None
        self._reported = False
        self.run_folder: Path | None = None  # of temporary files, while a Ray of the run's own has it
        self.workers: Workers | None = None

    def report_hang(self, why: str, ask_ray: bool = True) -> None:
        """Write the hang report. Only the first call for an attempt of the run does.

        Args:
            why: The sentence about the wait that has exceeded its limit.
            ask_ray: Whether Ray works, so that workers can be asked through it.
        """
        if self._reported:
            return
        self._reported = True
        with suppress(OSError):  # the failure itself is reported in any case
            report = hang_report(why, self.workers if ask_ray else None, self.run_folder, self._output_dir)
            path = self._make_folder() / HANG_REPORT
            path.touch(mode=0o600)
            path.write_text(hide_in_text(report, self._hidden()), encoding="utf-8", errors="backslashreplace")
            tell(f"{why}; the stacks of all processes are in {path}")

    def keep_ray_logs(self) -> None:
        """Copy the logs of the run's own Ray, which are removed with its temporary folder."""
        if self.run_folder is None:
            return
        with suppress(OSError):
            copy_ray_logs(self.run_folder, self._make_folder() / RAY_LOGS, self._hidden())

    def next_attempt(self) -> None:
        """Make a new folder at the next failure: the run started another attempt, or replaced a worker."""
        self._folder = None
        self._reported = False

    def in_words(self) -> str:
        """Return the end of a sentence that names the kept files; empty if there are none."""
        if self._folder is None:
            return ""
        files = {HANG_REPORT: "the stacks of all processes", RAY_LOGS: "Ray's logs"}
        phrases = [f"{words} are in {self._folder / name}" for name, words in files.items() if self._has(name)]
        return "".join(f"; {each}" for each in phrases)

    def _has(self, name: str) -> bool:
        assert self._folder is not None
        path = self._folder / name
        return path.is_file() or (path.is_dir() and any(path.iterdir()))

    def _hidden(self) -> set[str]:
        secrets = {*self._secrets, *secrets_in("environment", os.environ)}
        return {secret for secret in secrets if len(secret) >= SHORTEST_HIDDEN_IN_TEXT}

    def _make_folder(self) -> Path:
        """Return the folder of this failure, made at the first call; the oldest folders of others are removed."""
        if self._folder is None:
            folder = self._output_dir / time.strftime("failure-%Y%m%d-%H%M%S")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = folder
            folders = [path for path in self._output_dir.iterdir() if _FOLDER.fullmatch(path.name)]
            for old in sorted(folders)[:-MOST_FOLDERS]:
                shutil.rmtree(old, ignore_errors=True)
        return self._folder


def copy_ray_logs(run_folder: Path, target: Path, secrets: Collection[str]) -> None:
    """Copy the end of each log of Ray's session to ``target``, up to ``TOTAL_BYTES`` together.

    Ray's logs hold the environment of workers. Nobody but the user can read the copies.

    Args:
        run_folder: The run's temporary folder, which has Ray's session.
        target: The folder of the copies; made if there is something to copy.
        secrets: Texts that are hidden in the copies.
    """
    left = TOTAL_BYTES
    logs = [path for path in run_folder.glob("session_2*/logs/*") if path.is_file() and not path.is_symlink()]
    for path in sorted(logs, key=lambda path: (_rank(path.name), path.name)):
        with suppress(OSError):  # it cannot be read, or was removed meanwhile
            text = end_of(path, min(FILE_BYTES, left))
            if not text:
                continue
            left -= len(text)
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
            copy = target / path.name
            copy.touch(mode=0o600)
            copy.write_bytes(
                hide_in_text(text.decode(errors="surrogateescape"), secrets).encode(errors="surrogateescape")
            )


def _rank(name: str) -> int:
    return next((number for number, start in enumerate(_ORDER) if name.startswith(start)), len(_ORDER))
