"""``--max-restarts``: a run whose worker processes die goes on from its last checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ray.exceptions

from miles.arguments.checkpoint import CheckpointArguments
from miles.arguments.settings import Settings
from miles.cluster.failures import cause_of, in_one_line, show
from miles.training.checkpoint_folder import newest


def with_restarts(settings: Settings, attempt: Callable[[Settings], None]) -> None:
    """``attempt(settings)``; when a worker process dies or fails, again, up to ``--max-restarts`` times.

    Every further attempt resumes the newest checkpoint in ``--save``; before there is one it begins as the first did.
    ``attempt`` leaves no process behind, however it ends. What is the user's to mend (a ``ValueError``) is raised at
    once, and so is what fails in the launcher itself. Raises ``ValueError`` where ``--save`` holds checkpoints that are
    not this run's: a restart would take them for its own.
    """
    left = settings.cluster.max_restarts
    if left:
        _check_own_folder(settings.checkpoint)
    while True:
        try:
            return attempt(settings)
        except ray.exceptions.RayError as error:
            if left == 0 or isinstance(cause_of(error), ValueError):
                raise
            show(error)
            settings = resuming(settings)
            start = "its last checkpoint" if settings.checkpoint.load else "the beginning, as nothing was saved yet"
            left -= 1
            print(
                f"train.py: {in_one_line(error)}; going on from {start} ({left} restarts left)",
                file=sys.stderr,
                flush=True,
            )


def resuming(settings: Settings) -> Settings:
    """The settings of a run that goes on from what ``settings`` has saved; the same ones where that is nothing."""
    given = settings.checkpoint
    if given.save is None or newest(Path(given.save)) is None:
        return settings
    checkpoint = replace(given, load=given.save, finetune=False, no_load_optim=False, no_load_rng=False)
    return replace(settings, checkpoint=checkpoint)


def _check_own_folder(given: CheckpointArguments) -> None:
    assert given.save is not None, "validate() requires --save with --max-restarts"
    goes_on = given.load is not None and Path(given.load).resolve() == Path(given.save).resolve()
    if newest(Path(given.save)) is not None and (given.finetune or not goes_on):
        raise ValueError(
            f"--save {given.save}: holds checkpoints of an earlier run, which --max-restarts would go on from; resume "
            f"them with --load {given.save} (without --finetune), or give another folder"
        )
