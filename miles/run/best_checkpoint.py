"""The best checkpoint of a run by a metric (``--save-best``): ``best.json`` in the folder of ``--save`` names it.

It is a checkpoint alongside the others, and stays until a better one is complete. The file is replaced after that, so
it never names a checkpoint that is still being written. The flags that prune decide about the one before
(training/checkpoint_files.py) if they are given; without them it goes unless it was due anyway.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from miles.config.checkpoint import checkpoint_name, read_best
from miles.config.settings import Settings
from miles.training.checkpoint_files import (
    DamagedFile,
    at,
    prune,
    read_json_object,
    remove,
    sync,
    whole_of,
    write_through,
)
from miles.types.metrics import Metric

FILE_NAME = "best.json"


@dataclass(frozen=True)
class BestCheckpoint:
    """The best checkpoint so far.

    Attributes:
        metric: The metric that it is the best by.
        mode: Whether the largest or the smallest value is the best.
        value: Its value.
        iterations: The iterations before the checkpoint.
        due: Whether a checkpoint was due anyway.
    """

    metric: str
    mode: Literal["max", "min"]
    value: float
    iterations: int
    due: bool

    @property
    def name(self) -> str:
        """The name of its folder."""
        return checkpoint_name(self.iterations)

    def save(self, root: Path) -> None:
        """Write the file in the folder of checkpoints ``root``, in one step."""
        staged = root / f".{FILE_NAME}"
        write_through(staged, json.dumps(asdict(self)).encode())
        os.replace(staged, root / FILE_NAME)
        sync(root)


def best_in(root: Path) -> BestCheckpoint | None:
    """Return the record in the file in ``root``; None without one, or if its checkpoint is not there any more."""
    if not (root / FILE_NAME).is_file():
        return None
    try:
        record = _read(read_json_object(root, FILE_NAME))
    except DamagedFile:
        return None
    return record if record is not None and (root / record.name).is_dir() else None


def _read(record: dict[str, Any]) -> BestCheckpoint | None:
    kinds: dict[str, Any] = {"metric": str, "mode": str, "value": (int, float), "iterations": int, "due": bool}
    if record.keys() != kinds.keys() or not all(isinstance(record[name], kind) for name, kind in kinds.items()):
        return None
    return BestCheckpoint(**record) if record["mode"] in ("max", "min") else None


class BestSoFar:
    """States whether an iteration is the best by the metric of ``--save-best``.

    Args:
        metric: The value of the flag.
        root: The folder of ``--save``.
        done: The iterations that the run has done; a best checkpoint of a later iteration is ignored.
    """

    def __init__(self, metric: str, root: Path, done: int) -> None:
        self.metric, self.mode = read_best(metric)
        self.seen = False  # whether an iteration had the metric
        self.best = best_in(root)
        if self.best is not None and (
            (self.best.metric, self.best.mode) != (self.metric, self.mode) or self.best.iterations > done
        ):
            self.best = None

    def improved_by(self, metrics: Mapping[str, Metric], iterations: int, due: bool) -> BestCheckpoint | None:
        """Return the checkpoint to save after ``iterations`` if they are the best so far, else None.

        Args:
            metrics: The metrics of the last iteration.
            iterations: The iterations that are done.
            due: Whether a checkpoint is due then anyway.
        """
        if self.metric not in metrics:
            return None
        self.seen = True
        value = metrics[self.metric].value
        sign = 1.0 if self.mode == "max" else -1.0
        if not math.isfinite(value) or (self.best is not None and sign * value <= sign * self.best.value):
            return None
        self.best = BestCheckpoint(self.metric, self.mode, value, iterations, due)
        return self.best


def remove_superseded(saved: Path, settings: Settings, best: BestCheckpoint | None) -> None:
    """Record a new best checkpoint, and remove those that the flags do not keep.

    One that was the best by another metric stays: nothing better by that metric is saved. One that cannot be removed
    does not stop the run.

    Args:
        saved: The checkpoint that the run has just published.
        settings: The run.
        best: The record of ``saved`` as the best so far, if it is.

    Raises:
        OSError: The record of the best checkpoint cannot be written.
    """
    section, model = settings.checkpoint, settings.model
    root = saved.parent
    prunes = section.save_keep_last is not None or section.save_retain_interval is not None
    before = best_in(root) if section.save_best is not None else None
    if before is not None and best is not None and before.name == best.name:
        before = None  # recorded by an earlier call, after which an upload failed
    if best is not None:
        best.save(root)
    frozen = [Path(path) for path in (model.ref_load, model.opd_teacher_load) if path is not None]
    try:
        in_use = [whole_of(folder) for path in frozen if (folder := at(path)) is not None]
        current = best_in(root)
        if current is not None:
            in_use.append(root / current.name)
        if best is not None and before is not None and (before.metric, before.mode) != (best.metric, best.mode):
            in_use.append(root / before.name)
            until = " until --save-keep-last and --save-retain-interval remove it" if prunes else ""
            print(
                f"note: --save-best {section.save_best}: {FILE_NAME} now names {best.name}; {before.name}, the best by "
                f"{before.metric}:{before.mode}, stays{until}"
            )
        elif best is not None and before is not None and not before.due and not prunes:
            superseded = root / before.name
            if superseded.resolve() not in (path.resolve() for path in in_use):
                remove(superseded)
        prune(saved, section.save_keep_last, section.save_retain_interval, in_use)
    except OSError as error:
        print(f"note: --save {section.save}: an older checkpoint stays, as it cannot be removed ({error})")
