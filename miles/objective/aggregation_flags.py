"""Which aggregation the flags ask for: three vocabularies in, one mode and its divisor out."""

from __future__ import annotations

import math
from dataclasses import replace

from miles.flags import refuse
from miles.objective.settings import Aggregation, LossArguments

# verl's name -> ours. Its sums over a sequence are ours with a constant divisor.
VERL_MODES: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sample_mean",
    "seq-mean-token-sum-norm": "constant",
    "seq-mean-token-sum": "constant",
}


def reconcile_aggregation(
    loss: LossArguments, max_response_len: int, trajectories_per_step: int, samples_per_prompt: int
) -> tuple[LossArguments, list[str]]:
    """The loss section with one honest ``loss_aggregation`` and no alias left, and a note a change made.

    Raises ``ValueError`` for every combination in which a flag would be ignored or the normalization undone
    (docs/loss-aggregation.md has the table).
    """
    notes: list[str] = []
    loss = _from_pg_loss_divisor(loss, notes)
    loss = _from_verl(loss, max_response_len, notes)
    _check_custom_reducer(loss)
    _check_divisor(loss)
    loss = _reconcile_per_token(loss, notes)
    _check_whole_groups(loss, trajectories_per_step, samples_per_prompt)
    return loss, notes


def _from_pg_loss_divisor(loss: LossArguments, notes: list[str]) -> LossArguments:
    divisor = loss.pg_loss_divisor
    if divisor is None:
        return loss
    way_out = "give --loss-aggregation constant --loss-aggregation-divisor L alone"
    if loss.loss_aggregation not in ("sample_mean", "constant"):
        refuse("pg_loss_divisor", divisor, f"contradicts --loss-aggregation {loss.loss_aggregation}", way_out)
    if loss.loss_agg_mode is not None:
        refuse("pg_loss_divisor", divisor, f"contradicts --loss-agg-mode {loss.loss_agg_mode}", way_out)
    if loss.loss_aggregation_divisor is not None:
        rule = f"names the divisor twice, beside --loss-aggregation-divisor {loss.loss_aggregation_divisor:g}"
        refuse("pg_loss_divisor", divisor, rule, way_out)
    if loss.custom_pg_loss_reducer_function_path is not None:
        rule = "would be ignored beside --custom-pg-loss-reducer-function-path"
        refuse("pg_loss_divisor", divisor, rule, "keep one of the two")
    _check_divisor_value("pg_loss_divisor", divisor)
    notes.append(f"--pg-loss-divisor {divisor:g} is read as --loss-aggregation constant with divisor {divisor:g}")
    return replace(loss, loss_aggregation="constant", loss_aggregation_divisor=divisor, pg_loss_divisor=None)


def _from_verl(loss: LossArguments, max_response_len: int, notes: list[str]) -> LossArguments:
    name, factor = loss.loss_agg_mode, loss.loss_scale_factor
    if name is None:
        if factor is not None:
            way_out = "add --loss-agg-mode seq-mean-token-sum-norm, or use --loss-aggregation-divisor"
            refuse("loss_scale_factor", factor, "would be ignored without --loss-agg-mode", way_out)
        return loss
    _check_verl_stands_alone(loss, name)
    mode = VERL_MODES[name]
    divisor: float | None = None
    if name == "seq-mean-token-sum-norm":
        divisor = _verl_divisor(factor, max_response_len, notes)
    elif factor is not None:
        way_out = "use seq-mean-token-sum-norm, or drop --loss-scale-factor"
        refuse("loss_scale_factor", factor, f"would be ignored by --loss-agg-mode {name}", way_out)
    elif name == "seq-mean-token-sum":
        divisor = 1.0
    suffix = "" if divisor is None else f" with divisor {divisor:g}"
    notes.append(f"--loss-agg-mode {name} is read as --loss-aggregation {mode}{suffix}")
    return replace(
        loss, loss_aggregation=mode, loss_aggregation_divisor=divisor, loss_agg_mode=None, loss_scale_factor=None
    )


def _check_verl_stands_alone(loss: LossArguments, name: str) -> None:
    if loss.custom_pg_loss_reducer_function_path is not None:
        rule = "would be ignored: --custom-pg-loss-reducer-function-path takes precedence"
        refuse("loss_agg_mode", name, rule, "drop one of the two")
    if loss.calculate_per_token_loss and name != "token-mean":
        rule = f"would divide the normalization of --loss-agg-mode {name} away"
        refuse("calculate_per_token_loss", True, rule, "drop it, or use --loss-agg-mode token-mean")
    if loss.loss_aggregation != "sample_mean":
        rule = f"names the aggregation twice, beside --loss-aggregation {loss.loss_aggregation}"
        refuse("loss_agg_mode", name, rule, "keep one of the two")
    if loss.loss_aggregation_divisor is not None:
        rule = f"cannot use --loss-aggregation-divisor {loss.loss_aggregation_divisor:g}"
        refuse(
            "loss_agg_mode", name, rule, "give the divisor as --loss-scale-factor, or use --loss-aggregation constant"
        )


def _verl_divisor(factor: float | None, max_response_len: int, notes: list[str]) -> float:
    if factor is not None:
        _check_divisor_value("loss_scale_factor", factor)
        return factor
    notes.append(
        f"--loss-scale-factor is not given: --rollout-max-response-len {max_response_len} is used, as verl uses the "
        "padded response length"
    )
    return float(max_response_len)


def _check_custom_reducer(loss: LossArguments) -> None:
    if loss.custom_pg_loss_reducer_function_path is not None and loss.loss_aggregation != "sample_mean":
        rule = "would be ignored: --custom-pg-loss-reducer-function-path takes precedence"
        refuse("loss_aggregation", loss.loss_aggregation, rule, "drop one of the two")


def _check_divisor(loss: LossArguments) -> None:
    mode, divisor = loss.loss_aggregation, loss.loss_aggregation_divisor
    if mode != "constant":
        if divisor is not None:
            rule = f"would be ignored by --loss-aggregation {mode}"
            way_out = "use --loss-aggregation constant, or drop --loss-aggregation-divisor"
            refuse("loss_aggregation_divisor", divisor, rule, way_out)
        return
    if divisor is None:
        way_out = "add --loss-aggregation-divisor L; the longest response, --rollout-max-response-len, is usual"
        refuse("loss_aggregation", "constant", "needs the number that token losses are divided by", way_out)
    else:
        _check_divisor_value("loss_aggregation_divisor", divisor)


def _check_divisor_value(field: str, divisor: float) -> None:
    if not (math.isfinite(divisor) and divisor > 0):
        refuse(field, divisor, "the divisor must be finite and above 0", "the longest response length is usual")


def _reconcile_per_token(loss: LossArguments, notes: list[str]) -> LossArguments:
    """``token_mean`` and the per-token path are one setting: each implies the other."""
    mode, per_token = loss.loss_aggregation, loss.calculate_per_token_loss
    if mode == "token_mean" and not per_token:
        notes.append("--loss-aggregation token_mean sets --calculate-per-token-loss")
    elif mode == "sample_mean" and per_token:
        if loss.custom_pg_loss_reducer_function_path is not None:
            return loss  # the mode has no part in pg_loss; the reducer is told of the switch, diagnostics are per token
        notes.append("--calculate-per-token-loss is --loss-aggregation token_mean: relabelled, same computation")
    elif per_token and mode != "token_mean":
        rule = f"would divide the normalization of --loss-aggregation {mode} away"
        refuse("calculate_per_token_loss", True, rule, "drop it, or use --loss-aggregation token_mean")
    if mode == "token_mean" or per_token:
        return replace(loss, loss_aggregation="token_mean", calculate_per_token_loss=True)
    return loss


def _check_whole_groups(loss: LossArguments, trajectories_per_step: int, samples_per_prompt: int) -> None:
    if loss.loss_aggregation == "prompt_mean" and trajectories_per_step % samples_per_prompt:
        rule = (
            f"a step of --global-batch-size {trajectories_per_step} rollouts could cut a prompt group of "
            f"--n-samples-per-prompt {samples_per_prompt} in two"
        )
        way_out = f"make --global-batch-size a multiple of {samples_per_prompt}, or use another aggregation"
        refuse("loss_aggregation", "prompt_mean", rule, way_out)
