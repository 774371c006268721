"""The folder of a failure: ``failure-TIME/`` in the output folder, made when something is to be kept.

It has the report of a hang, and the ends of Ray's logs, whose own folder is removed with the run.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from miles.base.secret_values import SHORTEST_HIDDEN_IN_TEXT, hide_in_text, secrets_in
from miles.run.failure_files.hang_report import hang_report
from miles.run.liveness import Workers

KEPT_FOLDERS = 5  # in an output folder, the newest
HANG_REPORT = "hang_report.txt"
RAY_LOGS = "ray_logs"
FILE_BYTES = 1_000_000  # the end of each of Ray's logs
TOTAL_BYTES = 20_000_000  # of them together
# Beginnings of their names; those that say most about a death come first.
_ORDER = ("raylet", "gcs_server", "worker-", "python-core-worker", "python-core-driver")
_FOLDER = re.compile(r"failure-\d{8}-\d{6}")


class FailureFiles:
    """Keep what explains the failure of a run, without its secrets, readable by its user only.

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
            path = self._made() / HANG_REPORT
            path.touch(mode=0o600)
            path.write_text(hide_in_text(report, self._hidden()), encoding="utf-8", errors="backslashreplace")
            print(f"train.py: {why}; the stacks of all processes are in {path}", file=sys.stderr, flush=True)

    def keep_ray_logs(self) -> None:
        """Copy the logs of the run's own Ray, which are removed with its temporary folder."""
        if self.run_folder is None:
            return
        with suppress(OSError):
            copy_ray_logs(self.run_folder, self._made() / RAY_LOGS, self._hidden())

    def next_attempt(self) -> None:
        """Make a new folder at the next failure: the run started another attempt, or replaced a worker."""
        self._folder, self._reported = None, False

    def in_words(self) -> str:
        """Return the end of a sentence that names what was kept; empty if nothing was."""
        if self._folder is None:
            return ""
        kept = {HANG_REPORT: "the stacks of all processes", RAY_LOGS: "Ray's logs"}
        found = [f"{words} are in {self._folder / name}" for name, words in kept.items() if self._has(name)]
        return "".join(f"; {each}" for each in found)

    def _has(self, name: str) -> bool:
        assert self._folder is not None
        path = self._folder / name
        return path.is_file() or (path.is_dir() and any(path.iterdir()))

    def _hidden(self) -> set[str]:
        found = {*self._secrets, *secrets_in("environment", os.environ)}
        return {secret for secret in found if len(secret) >= SHORTEST_HIDDEN_IN_TEXT}

    def _made(self) -> Path:
        if self._folder is None:
            folder = self._output_dir / time.strftime("failure-%Y%m%d-%H%M%S")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = folder
            own = [path for path in self._output_dir.iterdir() if _FOLDER.fullmatch(path.name)]
            for old in sorted(own)[:-KEPT_FOLDERS]:
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
            text = _end(path, min(FILE_BYTES, left))
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


def _end(path: Path, limit: int) -> bytes:
    """Return the last whole lines of a file, at most ``limit`` bytes."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - limit))
        text = file.read(limit)
    return text if size <= limit else text.partition(b"\n")[2]
