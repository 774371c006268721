"""What the advantage estimator, and the critic that one of them trains, must satisfy."""

from __future__ import annotations

from miles.arguments.critic import CriticArguments
from miles.arguments.settings import Settings
from miles.flags import above, at_least, refuse, refuse_ignored, within
from miles.objective.aggregation_flags import VERL_MODES
from miles.objective.settings import LossArguments

# Flags of the policy loss alone: nothing of it is computed where the critic learns alone.
OF_POLICY_LOSS = (
    "eps_clip",
    "eps_clip_high",
    "eps_clip_c",
    "entropy_coef",
    "use_opsm",
    "use_tis",
    "use_rs",
    "get_mismatch_metrics",
    "use_kl_loss",
    "normalize_advantages",
    "custom_pg_loss_reducer_function_path",
    "pg_loss_divisor",
    "loss_canary",
)


def check_estimator(settings: Settings) -> None:
    """Ranges, and that every flag given is read by the estimator."""
    loss = settings.loss
    within(loss, 0, 1, "gamma", "lambd")
    above(loss, 0, "value_clip")
    _check_read(loss)
    if loss.has_critic:
        _check_critic(settings)
    else:
        check_no_critic(settings.critic, f"by --advantage-estimator {loss.advantage_estimator}, which has no critic")


def check_no_critic(critic: CriticArguments, why: str) -> None:
    """Refuse the critic's flags in a run without one."""
    refuse_ignored(critic, vars(critic), why, "use --advantage-estimator ppo")


def _check_read(loss: LossArguments) -> None:
    name = loss.advantage_estimator
    why, way_out = f"by --advantage-estimator {name}", "use --advantage-estimator ppo"
    if not loss.has_critic:
        refuse_ignored(loss, ["lambd", "value_clip"], f"{why}, which has no critic", way_out)
    if name not in ("ppo", "reinforce_plus_plus"):
        refuse_ignored(loss, ["gamma"], f"{why}, which discounts nothing", way_out)
    if name in ("grpo", "gspo"):
        refuse_ignored(loss, ["kl_coef"], f"{why}, which has no token rewards", "use --use-kl-loss --kl-loss-coef")
    else:
        _check_token_advantages(loss)


def _check_token_advantages(loss: LossArguments) -> None:
    """Estimators whose rewards are the tokens' own."""
    name = loss.advantage_estimator
    way_out = "use --advantage-estimator grpo"
    unread = ["disable_grpo_std_normalization", "disable_rewards_normalization"]
    why = f"by --advantage-estimator {name}, which does not divide by a group's spread"
    refuse_ignored(loss, unread[:1], why, way_out)
    if name == "reinforce_plus_plus_baseline":
        if loss.disable_rewards_normalization:
            rule = f"contradicts --advantage-estimator {name}, whose baseline is the group's mean"
            refuse("disable_rewards_normalization", True, rule, "use --advantage-estimator reinforce_plus_plus")
    else:
        refuse_ignored(loss, unread[1:], f"by --advantage-estimator {name}, which takes rewards as they are", way_out)
    if name != "ppo" and not loss.normalize_advantages:
        refuse("advantage_estimator", name, "is defined with whitened advantages", "add --normalize-advantages")
    if loss.use_opsm:
        rule = f"drops sequences of negative advantage, and --advantage-estimator {name} has one for each token"
        refuse("use_opsm", True, rule, way_out)


def _check_critic(settings: Settings) -> None:
    critic, rollouts = settings.critic, settings.rollout.num_rollout
    above(critic, 0, "critic_lr")
    at_least(critic, 0, "critic_lr_warmup_iters", "num_critic_only_steps")
    rate = settings.critic_optimizer.lr
    if rate < settings.optimizer.min_lr:
        rule = f"is below --min-lr {settings.optimizer.min_lr:g}, at which its decay ends"
        refuse("critic_lr", f"{rate:g}", rule, "give at least --min-lr")
    alone = critic.num_critic_only_steps
    if rollouts is not None and alone >= rollouts and settings.loss.loss_type == "policy_loss":
        rule = f"leaves none of the --num-rollout {rollouts} rollouts to the policy"
        refuse(
            "num_critic_only_steps", alone, rule, "give fewer, or train the critic alone with --loss-type value_loss"
        )


def check_value_loss(settings: Settings) -> None:
    """The critic learns alone, all through the run: everything of the policy loss would be ignored."""
    loss = settings.loss
    if not loss.has_critic:
        rule = f"trains a critic, and --advantage-estimator {loss.advantage_estimator} has none"
        refuse("loss_type", "value_loss", rule, "add --advantage-estimator ppo")
    why = "by --loss-type value_loss"
    refuse_ignored(loss, OF_POLICY_LOSS, why, "use --loss-type policy_loss")
    refuse_ignored(settings.critic, ["num_critic_only_steps"], f"{why}: the critic always learns alone", "drop it")
    warmup = ["lr_warmup_iters", "lr_warmup_fraction"]
    refuse_ignored(settings.optimizer, warmup, f"{why}: the policy does not learn", "use --critic-lr-warmup-iters")
    if settings.critic.critic_lr is not None:
        beside = f"beside --critic-lr {settings.critic.critic_lr:g} {why}: the policy does not learn"
        refuse_ignored(settings.optimizer, ["lr"], beside, "keep one of the two")
    mode = VERL_MODES.get(loss.loss_agg_mode or "", loss.loss_aggregation)
    if mode in ("prompt_mean", "constant"):
        name = "loss_aggregation" if loss.loss_agg_mode is None else "loss_agg_mode"
        rule = "would be ignored by --loss-type value_loss, which knows sample_mean and token_mean"
        refuse(name, getattr(loss, name), rule, "use one of these two")
