"""``--max-restarts``: restart a run whose worker processes die from its last checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ray.exceptions

from miles.arguments.settings import Settings
from miles.cluster.failures import cause_of, in_one_line, show
from miles.cluster.folders.resume_point import resume_point
from miles.training.checkpoint_folder import newest


def with_restarts(settings: Settings, attempt: Callable[[Settings], None]) -> None:
    """Call ``attempt(settings)``, and again if a worker process dies or fails, up to ``--max-restarts`` times.

    Every further attempt resumes the newest checkpoint in ``--save``, or starts from the beginning if there is none.
    ``attempt`` leaves no process behind, however it ends. A ``ValueError``, which the user has to fix, and a failure of
    the launcher itself are raised at once.
    """
    left = settings.cluster.max_restarts
    while True:
        try:
            return attempt(settings)
        except ray.exceptions.RayError as error:
            if left == 0 or isinstance(cause_of(error), ValueError):
                raise
            show(error)
            settings, notes = resuming(settings)
            for note in notes:
                print(f"note: {note}")
            start = "its last checkpoint" if settings.checkpoint.load else "the beginning, as nothing was saved yet"
            left -= 1
            print(
                f"train.py: {in_one_line(error)}; restarting from {start} ({left} restarts left)",
                file=sys.stderr,
                flush=True,
            )


def resuming(settings: Settings) -> tuple[Settings, tuple[str, ...]]:
    """Return ``settings`` changed to resume what the run has saved, and notes; unchanged if nothing was saved.

    Raises ``ValueError`` if everything it has saved is damaged.
    """
    given = settings.checkpoint
    if given.save is None or newest(Path(given.save)) is None:
        return settings, ()
    checkpoint = replace(given, load=given.save, finetune=False, no_load_optim=False, no_load_rng=False)
    point = resume_point(checkpoint)
    return replace(settings, checkpoint=point.checkpoint), point.notes
