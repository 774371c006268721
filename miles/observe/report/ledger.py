"""The token ledger: how the weight of each token of a stored sample arises, and the sum of these weights.

The policy loss of a step is ``1/N Σ_i 1/denominator_i Σ_t m_it w_it l_it`` (docs/loss-aggregation.md). The denominator
is stored with the sample, as the batch had it; nothing is recomputed from flags. Of a few samples the trainer has also
recorded w (``token_weights``), the ratio, its own log-prob and the advantage of each token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from miles.objective.aggregation import MODES, AggregationFlags
from miles.types.sample import NO_WEIGHTS

Settings = Mapping[str, Mapping[str, Any]]


def expand(runs: Sequence[Sequence[int]] | None) -> list[int]:
    """Return the values of run-length pairs.

    >>> expand([[1, 3], [0, 2]])
    [1, 1, 1, 0, 0]
    """
    return [value for value, count in runs or [] for _ in range(count)]


def is_recorded(row: Mapping[str, Any]) -> bool:
    """Return whether the row has the trainer's values of its tokens."""
    return bool(row.get("log_probs"))


def token_weight(row: Mapping[str, Any]) -> float | None:
    """Return the weight of one loss token of the sample, before corrections: 1 / (N · denominator)."""
    denominator, trajectories = row.get("denominator"), row.get("trajectories")
    if not denominator or not trajectories:
        return None
    return 1.0 / (float(denominator) * float(trajectories))


def share(row: Mapping[str, Any]) -> float | None:
    """Return the sample's part of the step's loss mass: the sum of its tokens' weights before corrections."""
    weight = token_weight(row)
    return None if weight is None or row.get("mask") is None else weight * sum(expand(row["mask"]))


def token_columns(row: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """Return the per-token columns that can be shown for a row, by name; empty if it was stored without tokens.

    ``weight`` is the token's weight in the loss, with corrections if the trainer has recorded them. ``credit`` is the
    advantage times this weight: the token's part in the gradient, at a ratio of 1. ``gap`` is the trainer's log-prob
    minus the engine's. The trainer's values of tokens outside the loss are left out (None).
    """
    count = len(row.get("tokens") or [])
    if not count:
        return {}
    mask = expand(row["mask"])
    columns: dict[str, list[float | None]] = {"mask": list(mask)}
    if row.get("weight_versions"):
        columns["version"] = [None if v == NO_WEIGHTS else v for v in expand(row["weight_versions"])]
    if row.get("rollout_log_probs"):
        columns["rollout_log_probs"] = list(row["rollout_log_probs"])
    weight = token_weight(row)
    if weight is not None:
        weights = [weight * m for m in mask]
        if row.get("token_weights"):
            weights = [w * (factor or 0.0) for w, factor in zip(weights, row["token_weights"], strict=True)]
        columns["weight"] = list(weights)
        if (advantages := _advantages(row, count)) is not None:
            columns["credit"] = [w * a for w, a in zip(weights, advantages, strict=True)]
            if row.get("advantages"):
                columns["advantage"] = _where(mask, list(advantages))
    if is_recorded(row):
        columns["ratio"] = _where(mask, row.get("ratios") or [1.0] * count)
        columns["log_probs"] = _where(mask, row["log_probs"])
        if row.get("rollout_log_probs"):
            pairs = zip(row["log_probs"], row["rollout_log_probs"], strict=True)
            gaps = [None if trainer is None or engine is None else trainer - engine for trainer, engine in pairs]
            columns["gap"] = _where(mask, gaps)
    return columns


def _advantages(row: Mapping[str, Any], count: int) -> list[float] | None:
    """Return the advantage of each token, by the trainer, or else the sample's; None if it is not stored."""
    if row.get("advantages"):
        return [value or 0.0 for value in row["advantages"]]
    return None if row.get("advantage") is None else [float(row["advantage"])] * count


def _where(mask: Sequence[int], values: Sequence[float | None]) -> list[float | None]:
    return [value if m else None for m, value in zip(mask, values, strict=True)]


def ledger(row: Mapping[str, Any], settings: Settings, step_rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the ledger of a sample, line by line: ``{"name", "value", "why"}``.

    Args:
        row: The stored sample.
        settings: The sections of run.json.
        step_rows: All stored samples of its iteration.
    """
    weight = token_weight(row)
    if weight is None:
        return []
    mask = expand(row.get("mask"))
    trained = sum(mask)
    loss = settings.get("loss", {})
    reducer = loss.get("custom_pg_loss_reducer_function_path")
    mode = str(loss.get("loss_aggregation", AggregationFlags.loss_aggregation))
    words = f"--custom-pg-loss-reducer-function-path {reducer}" if reducer else MODES[mode].words  # type: ignore[index]
    of_denominator = "the default one; the reducer decides" if reducer else MODES[mode].denominator  # type: ignore[index]
    lines = [
        _line("response tokens", f"{len(mask)}", "as generated, tools and environment included"),
        _line("loss tokens", f"{trained}", f"mask 1; {len(mask) - trained} tokens have mask 0 and weight 0"),
        _line("mode", "custom" if reducer else mode, words),
        _line("denominator", f"{row['denominator']:g}", of_denominator),
        _line("N", f"{row['trajectories']:g}", "trajectories of the optimizer step"),
        _line("weight of a loss token", f"{weight:.6g}", f"1 / ({row['trajectories']:g} · {row['denominator']:g})"),
        _correction_line(row, settings, weight * trained),
        _line("share of the sample", f"{weight * trained:.6g}", f"{trained} · {weight:.6g}, before corrections"),
        _step_line(row, step_rows),
    ]
    columns = token_columns(row)
    if row.get("advantages"):
        lines.append(
            _line("advantage", _range(columns["advantage"]), f"of a token, by {loss.get('advantage_estimator')}")
        )
    elif row.get("advantage") is not None:
        advantage = f"{float(row['advantage']):.6g}"
        lines.append(_line("advantage", advantage, f"of the sample, by {loss.get('advantage_estimator')}"))
    if (credits := columns.get("credit")) is not None:
        why = "sum of advantage · weight: what token losses of -advantage add to the loss, with the sign turned"
        lines.append(_line("credit of the sample", f"{sum(credit or 0.0 for credit in credits):.6g}", why))
    return [*(line for line in lines if line["value"]), *_trainer_lines(columns)]


def _trainer_lines(columns: Mapping[str, Sequence[float | None]]) -> list[dict[str, str]]:
    """Return the lines about the values that the trainer has recorded."""
    lines = []
    if columns.get("ratio"):
        why = "the policy in this step over the one that the iteration began with"
        lines.append(_line("ratio", _range(columns["ratio"]), why))
    gaps = [abs(gap) for gap in columns.get("gap", ()) if gap is not None]
    if gaps:
        why = f"nats per loss token, at most {max(gaps):.4g}: the trainer's log-probs minus the engine's"
        lines.append(_line("engine-trainer gap", f"{sum(gaps) / len(gaps):.4g}", why))
    return lines


def _range(values: Sequence[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "–"
    low, high = f"{min(numbers):.4g}", f"{max(numbers):.4g}"
    return low if low == high else f"{low} to {high}"


def _line(name: str, value: str, why: str) -> dict[str, str]:
    return {"name": name, "value": value, "why": why}


def _correction_line(row: Mapping[str, Any], settings: Settings, share_before: float) -> dict[str, str]:
    loss = settings.get("loss", {})
    flags = [f"--{name.replace('_', '-')}" for name in ("use_tis", "use_rs", "use_opsm") if loss.get(name)]
    if loss.get("top_entropy_quantile", 1.0) != 1:
        flags.append("--top-entropy-quantile")
    if not flags:
        return _line("corrections", "none", "every loss token keeps its weight")
    if not is_recorded(row):
        return _line("corrections", "not stored", f"the trainer multiplies the weights as {' '.join(flags)} say")
    factors = _where(expand(row.get("mask")), row.get("token_weights") or [1.0] * len(row["log_probs"]))
    after = sum(weight or 0.0 for weight in token_columns(row).get("weight", ()))
    why = f"factors of the tokens by {' '.join(flags)}; the share becomes {after:.4g} of {share_before:.4g}"
    return _line("corrections", _range(factors), why)


def _step_line(row: Mapping[str, Any], step_rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Add up the shares of the stored samples of the optimizer step, the mass that the canary measures."""
    same = [other for other in step_rows if other.get("train_step") == row.get("train_step")]
    stored = len({other.get("trajectory") for other in same})
    total = sum(share(other) or 0.0 for other in same)
    complete = stored == row["trajectories"]
    why = f"sum of the shares of {stored} of {row['trajectories']:g} trajectories"
    why += "; the canary measures this sum (train/loss_mass)" if complete else "; the others are not stored"
    return _line("mass of the step", f"{total:.6g}", why)
