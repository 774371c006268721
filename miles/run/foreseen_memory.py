"""Foresee the memory of a rank that trains on GPUs, so that it is logged alongside the measured memory.

The traces run in a process of their own, at low priority, while the run starts (commands/rehearsal/beside_run.py).
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from miles.config.settings import Settings
from miles.types.metrics import Metric

REHEARSAL = "miles.commands.rehearsal.beside_run"  # the module that this process runs
MEASURED = "perf/trainer_memory_gib"  # of the fullest rank, by the trainer's processes
FORESEEN = "perf/trainer_memory_foreseen_gib"


class ForeseenMemory:
    """Rehearses a run alongside it.

    Args:
        settings: All sections of the run.
    """

    def __init__(self, settings: Settings) -> None:
        self._gib: float | None = None
        self._is_noted = False
        with tempfile.TemporaryFile() as given:  # a pipe would make this process wait until the other one reads it
            given.write(pickle.dumps(settings))
            given.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", REHEARSAL],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
                text=True,
            )

    def beside(self, row: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return the foreseen memory if it is known by now, and note it once alongside the measurement in ``row``."""
        if not self._is_noted and self._process.poll() is not None:
            self._is_noted = True
            said, _ = self._process.communicate()
            found: dict[str, Any] = {"error": "the rehearsal failed"}
            if self._process.returncode == 0:
                found = json.loads(said.splitlines()[-1])  # user code may have printed before
            self._gib = found.get("gib")
            measured = row[MEASURED].value if MEASURED in row else None
            print(f"note: {_note(measured, self._gib, found.get('error'))}", file=sys.stderr)
        return {} if self._gib is None else {FORESEEN: Metric(self._gib)}

    def wait(self) -> None:
        """Wait until the rehearsal is over."""
        self._process.wait()

    def __enter__(self) -> ForeseenMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


def _note(measured: float | None, foreseen: float | None, error: str | None) -> str:
    held = "" if measured is None else f"the fullest trainer rank has allocated {measured:.1f} GiB; "
    if foreseen is None:
        return f"{held}--rehearse cannot foresee it: {error}"
    return f"{held}--rehearse foresees {foreseen:.1f} GiB with responses of the longest length"
