"""Check the loss together with other sections: reference, critic, and fine-tuning on saved samples."""

from __future__ import annotations

from miles.arguments.critic import CriticArguments
from miles.arguments.settings import Settings
from miles.flags import Errors
from miles.objective.chosen import check_objective
from miles.objective.settings import StepShape


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
        _check_no_critic(settings.critic, "by --loss-type sft_loss", errors)
    elif loss.has_critic:
        _check_critic(settings, errors)
    else:
        why = f"by --advantage-estimator {loss.advantage_estimator}, which has no critic"
        _check_no_critic(settings.critic, why, errors)


def _check_no_critic(critic: CriticArguments, why: str, errors: Errors) -> None:
    errors.refuse_ignored(critic, vars(critic), why, "use --advantage-estimator ppo")


def _check_critic(settings: Settings, errors: Errors) -> None:
    critic, iterations = settings.critic, settings.rollout.num_rollout
    errors.above(critic, 0, "critic_lr")
    errors.at_least(critic, 0, "critic_lr_warmup_iters", "num_critic_only_steps")
    rate = settings.critic_optimizer.lr
    if rate < settings.optimizer.min_lr:
        rule = f"is below --min-lr {settings.optimizer.min_lr:g}, at which its decay ends"
        errors.refuse("critic_lr", f"{rate:g}", rule, "give at least --min-lr")
    alone = critic.num_critic_only_steps
    if iterations is not None and alone >= iterations and settings.loss.loss_type != "value_loss":
        rule = f"leaves none of the --num-rollout {iterations} iterations to the policy"
        way_out = "give fewer, or train the critic alone with --loss-type value_loss"
        errors.refuse("num_critic_only_steps", alone, rule, way_out)
    if settings.loss.loss_type == "value_loss":
        _check_critic_alone(settings, errors)


def _check_critic_alone(settings: Settings, errors: Errors) -> None:
    why = "by --loss-type value_loss"
    alone = f"{why}: the critic always learns alone"
    errors.refuse_ignored(settings.critic, ["num_critic_only_steps"], alone, "drop it")
    warmup, not_learning = ["lr_warmup_iters", "lr_warmup_fraction"], f"{why}: the policy does not learn"
    errors.refuse_ignored(settings.optimizer, warmup, not_learning, "use --critic-lr-warmup-iters")
    if settings.critic.critic_lr is not None:
        beside = f"beside --critic-lr {settings.critic.critic_lr:g} {not_learning}"
        errors.refuse_ignored(settings.optimizer, ["lr"], beside, "keep one of the two")


def _check_sft(settings: Settings, errors: Errors) -> None:
    """Check that saved answers are named: supervised fine-tuning samples and scores nothing."""
    if settings.rollout.load_debug_rollout_data is None:
        rule = "trains on saved samples and generates none"
        errors.refuse("loss_type", "sft_loss", rule, "name their file with --load-debug-rollout-data")
    why, way_out = "by --loss-type sft_loss", "use --loss-type policy_loss"
    errors.refuse_ignored(settings.rollout, ["dynamic_sampling_filter_path"], why, way_out)
    if not settings.evaluation.has_sets:
        errors.refuse_ignored(settings.reward, ["rm_type", "custom_rm_path"], f"{why} without evaluation", way_out)
