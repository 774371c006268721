"""The files of a run in its output folder: metrics.jsonl and samples.jsonl, written step by step and read back."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.base.host.disk_faults import naming_disk
from miles.config.files import run_config
from miles.observe.tracking import jsonl, run_header
from miles.observe.tracking.identity import RunIdentity
from miles.observe.tracking.sample_file import SampleFile
from miles.observe.tracking.thinning import thin

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
TENSORBOARD = "tensorboard"
REPORT = "report.html"
CONFIG = run_config.FILE_NAME
ENDED_EARLY = "ended-early.json"  # of a run that came to its end before the last of its steps
_OF_RUN = (METRICS, SAMPLES, CONFIG, ENDED_EARLY, run_header.FILE_NAME)  # no command can write them again


@dataclass(frozen=True)
class SampleRecord:
    """One stored answer. ``status`` is a ``SampleStatus`` or its value.

    Everything after it may be missing (None): files of earlier versions have no more, and tokens are left out where
    they would not fit. The lists have one entry per response token. ``mask`` and ``weight_versions`` are run-length
    pairs, ``[[value, count], ...]``; version -1 is a token of a tool or an environment.

    Attributes:
        reward_parts: The parts of a reward that is a weighted sum, by name.
        group: The prompt draw, ``group_index``.
        trajectory: ``trajectory_id``.
        train_step: The optimizer step that trains on it.
        advantage: Phase 1 of the advantage, one number per sample; None if the estimator makes them per token.
        denominator: The sample's token losses are divided by it, and by ``trajectories``.
        trajectories: N, the number of trajectories of the optimizer step.
        tokens: The text of each token.
        mask: The loss mask.
        rollout_log_probs: The engine's log-probs.
        weight_versions: The weights behind each token.
        log_probs: The trainer's log-probs before the iteration's first step. They and the fields below are stored for
            few samples (``--samples-token-values``).
        ratios: Current policy over the one that the iteration began with; None: all are 1.
        token_weights: The product of the corrections of each token; None: all are 1.
        advantages: The advantage of each token; None: all are ``advantage``.
    """

    prompt: str
    response: str
    reward: float | None
    label: Any
    status: str
    reward_parts: dict[str, float] | None = None
    group: int | None = None
    trajectory: int | None = None
    train_step: int | None = None
    advantage: float | None = None
    denominator: float | None = None
    trajectories: int | None = None
    tokens: list[str] | None = None
    mask: list[list[int]] | None = None
    rollout_log_probs: list[float | None] | None = None
    weight_versions: list[list[int]] | None = None
    log_probs: list[float | None] | None = None
    ratios: list[float | None] | None = None
    token_weights: list[float | None] | None = None
    advantages: list[float | None] | None = None

    def row(self, step: int) -> dict[str, Any]:
        """Return the row of samples.jsonl; ``step`` is the last optimizer step of the iteration."""
        present = {name: value for name, value in vars(self).items() if value is not None or name in _ALWAYS}
        return {"rollout_id": step, **present, "status": str_value(self.status)}


_ALWAYS = ("prompt", "response", "reward", "label")  # in every row, null or not


class RunFiles:
    """Appends to, cuts back and reads the files of one run.

    Args:
        output_dir: Their folder.
        metrics_max_bytes: The bound of metrics.jsonl; None for none. Only appending to a file looks at it.

    >>> import tempfile
    >>> files = RunFiles(Path(tempfile.mkdtemp()))
    >>> for step in range(3):
    ...     files.append_metrics(step, {"rollout/reward": step / 2})
    >>> files.drop_from(1)
    0
    >>> files.read_metrics()
    [{'step': 0, 'rollout/reward': 0.0}]
    """

    def __init__(self, output_dir: Path, metrics_max_bytes: int | None = None) -> None:
        self.output_dir = output_dir
        self._metrics_max_bytes = metrics_max_bytes
        self._metrics = output_dir / METRICS
        self._samples = output_dir / SAMPLES

    def append_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add one row. A step may be given in several rows (training, then evaluation); reading joins them.

        Raises ``WriteFailed`` if the disk is full.
        """
        jsonl.append(self._metrics, [{"step": step, **values}])
        if self._metrics_max_bytes is not None and self._metrics.stat().st_size > self._metrics_max_bytes:
            thin(self._metrics, self._metrics_max_bytes)

    def append_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Add one row per sample. Raises ``WriteFailed`` if the disk is full."""
        jsonl.append(self._samples, (sample.row(step) for sample in samples))

    def read_metrics(self) -> list[dict[str, float]]:
        """Return one row per step, in order of steps; a null reads as NaN.

        Raises:
            ValueError: A line is damaged; the message names it or its file.
        """
        by_step: dict[int, dict[str, float]] = {}
        for row in jsonl.read(self._metrics, "step"):
            numbers = {name: math.nan if value is None else value for name, value in row.items()}
            by_step.setdefault(row["step"], {}).update(numbers)
        return [by_step[step] for step in sorted(by_step)]

    def read_samples(self) -> dict[int, list[SampleRecord]]:
        """Return all stored answers by step. ``SampleFile`` reads one iteration of a large file."""
        by_rollout: dict[int, list[SampleRecord]] = {}
        known = {field.name for field in dataclasses.fields(SampleRecord)}
        for row in jsonl.read(self._samples, "rollout_id"):
            record = SampleRecord(**{name: value for name, value in row.items() if name in known})
            by_rollout.setdefault(row["rollout_id"], []).append(record)
        return by_rollout

    def drop_from(self, step: int) -> int | None:
        """Forget this step and all later ones, which the resumed run repeats; give the last step that is left."""
        last = jsonl.drop_from(self._metrics, "step", step)
        SampleFile(self._samples).cut(step)
        return last

    def mark_ended_early(self, step: int) -> None:
        """Note that the run came to its end after ``step``, with nothing left to train on."""
        path = self.output_dir / ENDED_EARLY
        new = self.output_dir / f".{ENDED_EARLY}"
        with naming_disk(path, new):
            new.write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
            new.replace(path)

    def forget_early_end(self) -> None:
        """Remove that note: the run continues."""
        (self.output_dir / ENDED_EARLY).unlink(missing_ok=True)

    @property
    def ended_early_after(self) -> int | None:
        """The step of that note; None without one, or if it is damaged: a run that is resumed writes it again."""
        try:
            return int(json.loads((self.output_dir / ENDED_EARLY).read_text(encoding="utf-8"))["step"])
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            return None

    @property
    def run(self) -> RunIdentity | None:
        """The run that the folder belongs to; None if run.json does not say: it is missing, damaged or of old."""
        try:
            header = json.loads((self.output_dir / run_header.FILE_NAME).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        return RunIdentity.from_state(header) if isinstance(header, dict) else None

    @property
    def is_empty(self) -> bool:
        """Whether the folder has no metrics and no answers of any run."""
        return not self._metrics.exists() and not self._samples.exists()

    def set_aside(self) -> Path | None:
        """Move what an earlier run left here into ``earlier-1``, ``earlier-2``…; give that folder, None if none was."""
        # run.json last: if this is killed, it still says whose files are left.
        names = (TENSORBOARD, REPORT, *_OF_RUN)
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


def why_not_written(path: Path) -> str | None:
    """Return why a command does not write ``path``, as the end of a message: it is a folder, or a file of a run."""
    if path.is_dir():
        return "is a folder; give a file in it"
    if path.name in _OF_RUN and (path.parent / run_header.FILE_NAME).exists():
        return "is a file of a run, which would be lost; give another file"
    return None


def str_value(status: str) -> str:
    """Return the plain string of a status given as a string or as a member of a string enumeration."""
    return str.__str__(status)
