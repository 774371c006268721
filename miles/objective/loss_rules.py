"""What the loss section must satisfy, the aggregation apart (aggregation_rules.py)."""

from __future__ import annotations

from miles.arguments.settings import Settings
from miles.flags import above, at_least, finite, flag_name, refuse, refuse_ignored, within
from miles.objective.critic_rules import check_estimator, check_no_critic, check_value_loss
from miles.objective.settings import LossArguments

POLICY_FLAGS = (
    "disable_grpo_std_normalization",
    "disable_rewards_normalization",
    "eps_clip",
    "eps_clip_high",
    "eps_clip_c",
    "use_kl_loss",
    "entropy_coef",
    "advantage_estimator",
    "normalize_advantages",
    "gamma",
    "lambd",
    "value_clip",
    "kl_coef",
    "use_opsm",
    "use_tis",
    "use_rs",
    "get_mismatch_metrics",
)


def check_loss(settings: Settings) -> None:
    """Clip range, KL and entropy; and that every flag given belongs to the loss that is computed."""
    loss = settings.loss
    if loss.log_probs_chunk_size != -1 and loss.log_probs_chunk_size < 1:
        refuse(
            "log_probs_chunk_size", loss.log_probs_chunk_size, "must be -1 (all tokens) or at least 1", "1024 is usual"
        )
    _check_clip(loss)
    _check_kl(settings)
    _check_corrections(loss)
    finite(loss, "entropy_coef")
    if loss.loss_type == "sft_loss":
        _check_sft(settings)
        check_no_critic(settings.critic, "by --loss-type sft_loss")
        return
    _check_advantages(settings)
    check_estimator(settings)
    if loss.loss_type == "value_loss":
        check_value_loss(settings)


def _check_clip(loss: LossArguments) -> None:
    above(loss, 0, "eps_clip", "eps_clip_high")
    within(loss, 0, 1, "eps_clip")
    above(loss, 1, "eps_clip_c")


def _check_kl(settings: Settings) -> None:
    loss = settings.loss
    at_least(loss, 0, "kl_loss_coef", "kl_coef")
    if loss.kl_coef and loss.kl_loss_coef:
        rule = f"beside --kl-loss-coef {loss.kl_loss_coef:g} counts the KL twice, in the reward and in the loss"
        refuse("kl_coef", loss.kl_coef, rule, "keep one of the two")
    why, way_out = "without --use-kl-loss", "add that switch"
    if not loss.use_kl_loss:
        refuse_ignored(loss, ["kl_loss_coef"], why, way_out)
    if not loss.needs_reference:
        refuse_ignored(settings.model, ["ref_load"], why, way_out)


def _check_corrections(loss: LossArguments) -> None:
    for switch, names in (
        ("use_opsm", ["opsm_delta"]),
        ("use_tis", ["tis_clip", "tis_clip_low", "tis_mode", "tis_level"]),
        ("use_rs", ["rs_lower_bound", "rs_upper_bound", "rs_level"]),
    ):
        if not getattr(loss, switch):
            refuse_ignored(loss, names, f"without {flag_name(switch)}", "add that switch")
    above(loss, 0, "tis_clip", "rs_upper_bound")
    at_least(loss, 0, "tis_clip_low", "rs_lower_bound", "opsm_delta")
    for low, high in (("tis_clip_low", "tis_clip"), ("rs_lower_bound", "rs_upper_bound")):
        if getattr(loss, low) > getattr(loss, high):
            rule = f"is above {flag_name(high)} {getattr(loss, high):g}"
            refuse(low, getattr(loss, low), rule, "give bounds of which the lower is lower")
    if loss.custom_pg_loss_reducer_function_path is not None:
        why = "with --custom-pg-loss-reducer-function-path, whose weights are not known beforehand"
        refuse_ignored(loss, ["loss_canary"], why, "leave the default, which checks nothing then")


def _check_advantages(settings: Settings) -> None:
    loss, n = settings.loss, settings.rollout.n_samples_per_prompt
    if n == 1 and loss.normalizes_rewards:
        rule = (
            f"with --advantage-estimator {loss.advantage_estimator} every advantage is 0: a group of one has no spread"
        )
        refuse("n_samples_per_prompt", n, rule, "give 2 or more (8 is usual), or --disable-rewards-normalization")
    if loss.disable_rewards_normalization:
        why = "with --disable-rewards-normalization"
        refuse_ignored(loss, ["disable_grpo_std_normalization"], why, "keep one of the two")


def _check_sft(settings: Settings) -> None:
    """Supervised fine-tuning reads saved answers: it samples, scores and clips nothing."""
    if settings.rollout.load_debug_rollout_data is None:
        rule = "trains on saved samples and generates none"
        refuse("loss_type", "sft_loss", rule, "name their file with --load-debug-rollout-data")
    why, way_out = "by --loss-type sft_loss", "use --loss-type policy_loss"
    refuse_ignored(settings.loss, POLICY_FLAGS, why, way_out)
    refuse_ignored(settings.rollout, ["dynamic_sampling_filter_path"], why, way_out)
    if not settings.evaluation.has_sets:
        refuse_ignored(settings.reward, ["rm_type", "custom_rm_path"], f"{why} without evaluation", way_out)
