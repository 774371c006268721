"""Check the loss section, whose flags and rules are in ``miles/objective/``, together with other sections."""

from __future__ import annotations

from dataclasses import replace

from miles.base.flags import Errors, changed, flag_name
from miles.config.critic import check_critic
from miles.config.settings import Settings
from miles.objective.adaptive import check_adaptive_kl
from miles.objective.chosen import build_objective, check_objective
from miles.objective.estimators.base import Estimator
from miles.objective.registry import StepShape
from miles.objective.settings import LossArguments


def check_loss(settings: Settings, errors: Errors) -> None:
    """Check the loss section, and the flags of other sections that depend on it."""
    loss = settings.loss
    shape = StepShape(_trajectories_of_step(settings), settings.rollout.n_samples_per_prompt)
    check_objective(loss, shape, errors)
    _check_group(settings, errors)
    check_adaptive_kl(loss, shape.num_trajectories, errors)
    _check_one_makes_advantages(settings, errors)
    _check_old_log_probs(settings, errors)
    _check_teacher(settings, errors)
    _check_reward_parts(settings, errors)
    _check_removed_samples(settings, errors)
    if not loss.type.uses_advantages:
        _check_given_samples(settings, errors)
    elif loss.has_critic:
        check_critic(settings.critic, settings.optimizer, loss.type.trains_policy, settings.rollout.num_rollout, errors)


def _check_one_makes_advantages(settings: Settings, errors: Errors) -> None:
    """Check that at most one function of the user's makes the advantages."""
    given = {
        "custom_convert_samples_to_train_data_path": settings.rollout.custom_convert_samples_to_train_data_path,
        "custom_reward_post_process_path": settings.reward.custom_reward_post_process_path,
        "custom_advantage_function_path": settings.loss.custom_advantage_function_path,
    }
    first, *others = [name for name, path in given.items() if path is not None] or [""]
    for name in others:
        errors.refuse(name, given[name], f"makes the advantages, and so does {flag_name(first)}", "keep one of the two")


def _check_group(settings: Settings, errors: Errors) -> None:
    """Refuse groups so small that every advantage is 0, in a run that would learn from the comparison."""
    loss, samples = settings.loss, settings.rollout.n_samples_per_prompt
    if not (settings.trains and loss.type.uses_advantages and build_objective(loss).normalizes_rewards):
        return
    smallest = build_objective(loss).estimator.smallest_group(loss)
    if settings.given_advantages is None and 1 <= samples < smallest:
        rule = (
            f"with --advantage-estimator {loss.advantage_estimator} every advantage is 0 and nothing is learned: it "
            f"compares {smallest} or more answers of a prompt"
        )
        what_to_do = f"give {smallest} or more (8 is usual), or use an estimator that does not compare, such as ppo"
        errors.refuse("n_samples_per_prompt", samples, rule, what_to_do)


def _check_old_log_probs(settings: Settings, errors: Errors) -> None:
    """Check that the engine's log-probs are read, if they are the old ones, and are those that the trainer compares."""
    loss, rollout = settings.loss, settings.rollout
    if not loss.use_rollout_logprobs or not loss.type.uses_advantages:
        return  # what has no advantages refuses it on its own
    objective, flag = build_objective(loss), "use_rollout_logprobs"
    if objective.estimator.needs(loss).sum_squared_probs:
        rule = f"--advantage-estimator {loss.advantage_estimator} reads the trainer's probabilities of all tokens"
        errors.refuse(flag, True, rule, "drop it, or use --advantage-estimator rloo")
    if rollout.truncates_sampling and rollout.no_support_replay:
        rule = "the engine's log-probs are over the tokens that were kept, and the trainer's over the whole vocabulary"
        errors.refuse(flag, True, f"with --no-support-replay {rule}", "drop one of the two")


def _trajectories_of_step(settings: Settings) -> int:
    """Return N, which may be implied; numbers that do not divide are refused elsewhere."""
    rollout, training = settings.rollout, settings.training
    collected = (rollout.rollout_batch_size or 0) * rollout.n_samples_per_prompt
    return training.global_batch_size or collected // max(training.num_steps_per_rollout or 1, 1)


def _check_reward_parts(settings: Settings, errors: Errors) -> None:
    """Check that every sample has the parts of a sum of rewards, if the estimator reads them."""
    loss, reward, rollout = settings.loss, settings.reward, settings.rollout
    if not loss.type.uses_advantages or not build_objective(loss).estimator.reads_reward_parts:
        return
    if reward.custom_reward_post_process_path or rollout.custom_convert_samples_to_train_data_path:
        return  # advantages are the user's
    if reward.is_sum and reward.on_error == "value" and not rollout.loads_samples:
        name = "reward_error_value" if reward.reward_error is None else "reward_error"
        rule = (
            f"gives a failing answer one number, and --advantage-estimator {loss.advantage_estimator} reads each "
            f"reward of --rm-type {reward.rm_type} on its own"
        )
        errors.refuse(name, getattr(reward, name), rule, "use --reward-error drop")


def _check_removed_samples(settings: Settings, errors: Errors) -> None:
    """Check that no sample is removed from groups that the trainer compares: it sees unmasked tokens only."""
    loss, rollout = settings.loss, settings.rollout
    if not loss.type.uses_advantages or not build_objective(loss).estimator.reads_score_norms:
        return
    removing = ["filter_zero_reward_samples", "mask_truncated_completions", "rollout_sample_filter_path"]
    for name in changed(rollout, removing):
        rule = (
            f"removes samples after their rewards were compared, and --advantage-estimator {loss.advantage_estimator} "
            "compares the samples of a group on the trainer, where removed ones have no tokens"
        )
        errors.refuse(name, getattr(rollout, name), rule, "drop it, or use an estimator by sample such as rloo")


def _check_teacher(settings: Settings, errors: Errors) -> None:
    """Check that the trainer's teacher has weights, and that servers can give the values that the trainer compares."""
    loss, rollout = settings.loss, settings.rollout
    if loss.teacher_is_loaded and settings.model.opd_teacher_load is None:
        rule, what_to_do = "needs a teacher", "add --opd-teacher-load PATH, or --opd-teacher-urls URL"
        errors.refuse("use_opd", True, rule, what_to_do)
    if not loss.teacher_is_served:
        return
    if rollout.rollout_temperature != 1:
        rule = "the teacher's servers give log-probs at temperature 1"
        what_to_do = "give 1, or load the teacher with --opd-teacher-load"
        errors.refuse("rollout_temperature", rollout.rollout_temperature, rule, what_to_do)
    if rollout.replays_support:
        [name, *_] = changed(rollout, ["rollout_top_p", "rollout_top_k", "rollout_min_p"])
        rule = "the teacher's servers give log-probs over the whole vocabulary, not over what this keeps"
        what_to_do = "drop it, or load the teacher with --opd-teacher-load"
        errors.refuse(name, getattr(rollout, name), rule, what_to_do)
    why = "with --opd-type server, whose teachers score the samples that are generated"
    names = ["custom_convert_samples_to_train_data_path", "rollout_function_path"]
    what_to_do = "load the teacher with --opd-teacher-load"
    for name in changed(rollout, names):
        rule = f"makes samples that no teacher has scored {why}"
        errors.refuse(name, getattr(rollout, name), rule, what_to_do)


def name_policy_loss(loss: LossArguments) -> tuple[LossArguments, list[str]]:
    """Fill in ``policy_loss`` with the estimator's own in a run that has one; add a note if it is not the usual one.

    The flags must be valid. Under a loss type without one, and with a custom policy loss, there is none to name.
    """
    if loss.policy_loss is not None or not loss.type.uses_policy_loss or loss.custom_policy_loss_function_path:
        return loss, []
    estimator = build_objective(loss).estimator
    name = estimator.default_policy_loss
    notes = []
    if name != Estimator.default_policy_loss:
        notes = [f"--policy-loss is {name}: the default of --advantage-estimator {loss.advantage_estimator}"]
    return replace(loss, policy_loss=name), notes


def _check_given_samples(settings: Settings, errors: Errors) -> None:
    """Check that no temperature divides the logits of a loss that samples nothing."""
    temperature = settings.rollout.rollout_temperature
    if temperature != 1 and errors.none_about("rollout_temperature"):
        rule = f"would divide the logits whose likelihood --loss-type {settings.loss.loss_type} maximizes"
        errors.refuse("rollout_temperature", temperature, rule, "give 1; evaluation has --eval-temperature")
