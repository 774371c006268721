"""Check the loss section, whose flags and rules are in ``miles/objective/``, together with other sections."""

from __future__ import annotations

from collections.abc import Iterator

from miles.arguments.critic import check_critic, check_no_critic
from miles.arguments.settings import Settings
from miles.flags import Errors
from miles.objective.chosen import check_objective
from miles.objective.settings import LossArguments, StepShape


def check_loss(settings: Settings, errors: Errors) -> None:
    """Check the loss section, and the flags of other sections that depend on it."""
    loss = settings.loss
    # N may be implied; the rule that needs it is checked with the aggregation.
    shape = StepShape(settings.training.global_batch_size or 0, settings.rollout.n_samples_per_prompt)
    check_objective(loss, shape, errors)
    if not loss.needs_reference:
        errors.refuse_ignored(settings.model, ["ref_load"], "without --use-kl-loss", "add that switch")
    if loss.loss_type == "sft_loss":
        _check_sft(settings, errors)
        check_no_critic(settings.critic, "by --loss-type sft_loss", errors)
    elif loss.has_critic:
        check_critic(settings.critic, settings.optimizer, loss.loss_type, settings.rollout.num_rollout, errors)
    else:
        why = f"by --advantage-estimator {loss.advantage_estimator}, which has no critic"
        check_no_critic(settings.critic, why, errors)


def _check_sft(settings: Settings, errors: Errors) -> None:
    """Check that saved answers are named: supervised fine-tuning samples and scores nothing."""
    if not settings.rollout.loads_samples:
        rule = "trains on saved samples and generates none"
        errors.refuse("loss_type", "sft_loss", rule, "name their file with --load-debug-rollout-data")
    why, way_out = "by --loss-type sft_loss", "use --loss-type policy_loss"
    errors.refuse_ignored(settings.rollout, ["dynamic_sampling_filter_path"], why, way_out)
    if not settings.evaluation.has_sets:
        errors.refuse_ignored(settings.reward, ["rm_type", "custom_rm_path"], f"{why} without evaluation", way_out)


def notes_on_loss(loss: LossArguments) -> Iterator[str]:
    """Yield what is allowed and has no effect."""
    if loss.kl_loss_type != LossArguments.kl_loss_type and not loss.needs_reference:
        yield f"--kl-loss-type {loss.kl_loss_type} has no effect without --use-kl-loss or --kl-coef"
