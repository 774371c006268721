"""The files of a run in its output folder: metrics.jsonl and samples.jsonl, written step by step and read back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.tracking import jsonl, run_header

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
TENSORBOARD = "tensorboard"
REPORT = "report.html"


@dataclass(frozen=True)
class SampleRecord:
    """One sampled answer as the report shows it. ``status`` is a ``SampleStatus`` or its value."""

    prompt: str
    response: str
    reward: float | None
    label: Any
    status: str


class RunFiles:
    """Appends to, cuts back and reads the files of one run.

    >>> import tempfile
    >>> files = RunFiles(Path(tempfile.mkdtemp()))
    >>> for step in range(3):
    ...     files.append_metrics(step, {"rollout/reward": step / 2})
    >>> files.drop_from(1)
    >>> files.read_metrics()
    [{'step': 0, 'rollout/reward': 0.0}]
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self._metrics = output_dir / METRICS
        self._samples = output_dir / SAMPLES

    def append_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add one row. A step may be given in several rows (training, then evaluation); reading joins them."""
        jsonl.append(self._metrics, [{"step": step, **values}])

    def append_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Add one row per sample."""
        rows = ({"rollout_id": step, **dataclasses.asdict(s), "status": str_value(s.status)} for s in samples)
        jsonl.append(self._samples, rows)

    def read_metrics(self) -> list[dict[str, float]]:
        """Return one row per step, in order of steps; a null reads as NaN."""
        by_step: dict[int, dict[str, float]] = {}
        for row in jsonl.read(self._metrics):
            numbers = {name: math.nan if value is None else value for name, value in row.items()}
            by_step.setdefault(row["step"], {}).update(numbers)
        return [by_step[step] for step in sorted(by_step)]

    def read_samples(self) -> dict[int, list[SampleRecord]]:
        """Return the sampled answers by step."""
        by_rollout: dict[int, list[SampleRecord]] = {}
        for row in jsonl.read(self._samples):
            by_rollout.setdefault(row.pop("rollout_id"), []).append(SampleRecord(**row))
        return by_rollout

    def drop_from(self, step: int) -> None:
        """Forget this step and all later ones: the resumed run repeats them."""
        jsonl.drop_from(self._metrics, "step", step)
        jsonl.drop_from(self._samples, "rollout_id", step)

    def set_aside(self) -> Path | None:
        """Move what an earlier run left here into ``earlier-1``, ``earlier-2``…; give that folder, None if none was."""
        names = (METRICS, SAMPLES, TENSORBOARD, REPORT, run_header.FILE_NAME)
        present = [self.output_dir / name for name in names if (self.output_dir / name).exists()]
        if not present:
            return None
        number = 1
        while (folder := self.output_dir / f"earlier-{number}").exists():
            number += 1
        folder.mkdir()
        for path in present:
            path.rename(folder / path.name)
        return folder


def str_value(status: str) -> str:
    """Return the plain string of a status given as a string or as a member of a string enumeration."""
    return str.__str__(status)
