"""The arithmetic of a step: rollouts a step, steps a rollout, and how a step is cut into micro-batches."""

from __future__ import annotations

from dataclasses import replace

from miles.arguments.settings import Settings
from miles.arguments.training import TrainingArguments
from miles.flags import at_least, refuse, refuse_ignored


def reconcile_batch(settings: Settings) -> tuple[TrainingArguments, list[str]]:
    """The training section with ``global_batch_size`` filled in, and a note a number that was implied.

    Needs valid ``rollout_batch_size`` and ``n_samples_per_prompt``. Raises ``ValueError`` with the
    numbers that disagree.
    """
    training = settings.training
    at_least(training, 1, "global_batch_size", "num_steps_per_rollout", "micro_batch_size", "max_tokens_per_gpu")
    _check_micro_batches(training)
    return _fill_global_batch_size(settings)


def _fill_global_batch_size(settings: Settings) -> tuple[TrainingArguments, list[str]]:
    training, rollout = settings.training, settings.rollout
    collected = settings.trajectories_per_iteration
    product = (
        f"--rollout-batch-size {rollout.rollout_batch_size} x --n-samples-per-prompt {rollout.n_samples_per_prompt} "
        f"= {collected}"
    )
    size, steps = training.global_batch_size, training.num_steps_per_rollout
    if size is not None and collected % size:
        way_out = f"give a divisor of {collected}"
        refuse("global_batch_size", size, f"must divide the rollouts collected, {product}", way_out)
    if steps is not None and collected % steps:
        way_out = f"give a divisor of {collected}"
        refuse("num_steps_per_rollout", steps, f"must divide the rollouts collected, {product}", way_out)
    if size is not None and steps is not None and size * steps != collected:
        rule = f"with --num-steps-per-rollout {steps} makes {size * steps} rollouts, but {product}"
        refuse("global_batch_size", size, rule, "keep one of the two flags")
    if size is not None:
        return training, []
    size = collected // (steps or 1)
    source = f"--num-steps-per-rollout {steps}" if steps else "one step a rollout"
    return replace(training, global_batch_size=size), [f"--global-batch-size is {size}: {source}, {product}"]


def _check_micro_batches(training: TrainingArguments) -> None:
    if training.use_dynamic_batch_size:
        if training.max_tokens_per_gpu is None:
            way_out = "add --max-tokens-per-gpu (the longest prompt and response together is the least useful value)"
            refuse("use_dynamic_batch_size", True, "needs the token budget of a micro-batch", way_out)
        refuse_ignored(training, ["micro_batch_size"], "with --use-dynamic-batch-size", "drop one of the two")
    else:
        refuse_ignored(training, ["max_tokens_per_gpu"], "without --use-dynamic-batch-size", "add that switch")
