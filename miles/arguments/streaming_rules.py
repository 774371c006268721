"""Rollouts that stop early, are carried over or run beside training; the user's own rollout code; and restarts."""

from __future__ import annotations

from miles.arguments.rollout import RolloutArguments
from miles.arguments.settings import Settings
from miles.flags import at_least, changed, refuse, refuse_ignored


def check_streaming(settings: Settings) -> None:
    """Modes that exclude or need one another. Needs a valid ``rollout_batch_size``."""
    rollout = settings.rollout
    _check_early_stop(rollout)
    _check_async(settings)
    if rollout.rollout_function_path is not None:
        collecting = (
            "dynamic_sampling_filter_path",
            "over_sampling_batch_size",
            "over_sampling_early_stop",
            "partial_rollout",
            "fully_async",
        )
        refuse_ignored(rollout, collecting, "with --rollout-function-path, which collects by itself", "choose one")
    at_least(settings.cluster, 0, "max_restarts")
    if settings.checkpoint.save is None:
        why = "without --save: there would be no checkpoint to start from"
        refuse_ignored(settings.cluster, ["max_restarts"], why, "add --save DIR and --save-interval")


def _check_early_stop(rollout: RolloutArguments) -> None:
    batch, over_sampled = rollout.rollout_batch_size, rollout.over_sampling_batch_size
    if rollout.partial_rollout and rollout.over_sampling_early_stop:
        rule = "would give up what --partial-rollout carries over"
        refuse("over_sampling_early_stop", True, rule, "keep one of the two")
    if not rollout.partial_rollout:
        why = "without --partial-rollout"
        refuse_ignored(rollout, ["mask_offpolicy_in_partial_rollout"], why, "add that switch")
    for name in changed(rollout, ["partial_rollout", "over_sampling_early_stop"]):
        if over_sampled in (None, batch):
            rule = f"leaves nothing over where --rollout-batch-size {batch} prompts are submitted and all are needed"
            refuse(name, True, rule, f"give --over-sampling-batch-size above {batch}")


def _check_async(settings: Settings) -> None:
    rollout = settings.rollout
    at_least(rollout, 0, "async_steps")
    if rollout.async_steps and settings.cluster.colocate:
        rule = "generates while training, which --colocate's shared devices cannot"
        refuse("async_steps", rollout.async_steps, rule, "drop --colocate, or give 0")
    if not rollout.fully_async:
        refuse_ignored(rollout, ["stale_samples"], "without --fully-async", "add that switch")
        return
    if rollout.async_steps == 0:
        refuse("fully_async", True, "needs a bound on staleness of 1 or more", "give --async-steps 1, say")
    own_flow = ("over_sampling_batch_size", "over_sampling_early_stop", "partial_rollout")
    why = "with --fully-async, which takes groups as they complete and lets the rest run on"
    refuse_ignored(rollout, own_flow, why, "choose one")
