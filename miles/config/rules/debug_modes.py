"""Check the runs that are only half of a run: ``--debug-rollout-only`` and ``--debug-train-only``."""

from __future__ import annotations

import os
from collections.abc import Iterator

from miles.base.flags import Errors
from miles.config.checkpoint import first_iteration
from miles.config.evaluation import OF_SETS
from miles.config.rollout import names_iteration, path_of_iteration
from miles.config.settings import Settings

# Fields that mean nothing where nothing is trained, by their sections.
OF_TRAINING = {
    "checkpoint": (
        "save",
        "save_interval",
        "save_keep_last",
        "save_retain_interval",
        "save_hf",
        "start_over",
        "load",
        "no_load_fallback",
        "no_load_optim",
        "no_load_rng",
        "finetune",
        "storage_options",
        "remote_cache",
    ),
    "cluster": ("max_restarts",),
    "rollout": ("async_steps", "fully_async", "stale_samples"),
}
NOTHING_IS_TRAINED = "with --debug-rollout-only, which trains and saves nothing"
NOTHING_IS_GENERATED = "with --debug-train-only, which generates nothing"
OF_GENERATION = OF_SETS


def check_saved_samples(settings: Settings, errors: Errors) -> None:
    """Check that the first file of ``--load-debug-rollout-data`` is there."""
    path = settings.rollout.load_debug_rollout_data
    if path is None or not names_iteration(path):
        return
    first = first_iteration(settings.checkpoint)
    if first is not None:
        file = path_of_iteration(path, first)
        if not os.path.isfile(file):
            rule = f"no such file: {file}, of the first iteration of the run"
            errors.refuse("load_debug_rollout_data", path, rule, "check the path")


def notes_on_saved_samples(settings: Settings) -> Iterator[str]:
    """Yield a note on the first iteration of ``--load-debug-rollout-data`` that has no file."""
    path, last = settings.rollout.load_debug_rollout_data, settings.rollout.num_rollout
    if path is None or last is None or not names_iteration(path):
        return
    first = first_iteration(settings.checkpoint)
    if first is None:
        return
    files = (path_of_iteration(path, iteration) for iteration in range(first, last))
    missing = next((file for file in files if not os.path.isfile(file)), None)
    if missing is not None:
        yield (
            f"--load-debug-rollout-data {path}: {missing} is missing, so the run will stop there, before the "
            f"{last} iterations of --num-rollout"
        )


def check_debug_modes(settings: Settings, errors: Errors) -> None:
    """Check that one mode is chosen, and that no flag is given for the half that does not run."""
    rollout = settings.rollout
    if rollout.debug_rollout_only and rollout.debug_train_only:
        errors.refuse("debug_train_only", True, "contradicts --debug-rollout-only", "keep one of the two")
        return
    if rollout.debug_train_only:
        if not settings.is_given_samples:
            what_to_do = (
                "name a file of samples with --load-debug-rollout-data, or use --loss-type sft_loss with conversations"
            )
            errors.refuse("debug_train_only", True, "needs samples to train on", what_to_do)
        errors.refuse_ignored(settings.evaluation, OF_GENERATION, NOTHING_IS_GENERATED, "drop that switch")
    if rollout.debug_rollout_only:
        if settings.is_given_samples:
            rule = "would generate nothing: this run reads the samples that it trains on"
            what_to_do = "drop it, or drop --load-debug-rollout-data and --loss-type sft_loss"
            errors.refuse("debug_rollout_only", True, rule, what_to_do)
        for section, names in OF_TRAINING.items():
            errors.refuse_ignored(getattr(settings, section), names, NOTHING_IS_TRAINED, "drop that switch")
        if settings.cluster.colocate:
            rule = f"has no trainer to share devices with, {NOTHING_IS_TRAINED}"
            errors.refuse("colocate", True, rule, "give the engines --rollout-num-gpus instead")
