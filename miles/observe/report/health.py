"""Health verdicts: rules over the curves of a run. Each says what it measured, its threshold, and the flag to look at.

A rule compares the newest ``WINDOW`` measurements with its threshold, or with the first ``WINDOW`` of the run. It says
nothing before ``2 * WINDOW`` measurements: early steps are noisy, and a run that starts badly may be learning to do
better. To add a rule, write a function from ``Curves`` to a ``Finding`` and add it to ``RULES``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, Literal

from miles.observe.report.figures import evaluation_names
from miles.observe.report.metrics_file import MetricsFile
from miles.tasks.rewards.passing import deciding_part

WINDOW = 10

State = Literal["ok", "unhealthy", "no data"]


@dataclass(frozen=True)
class Finding:
    """What a rule found: whether it fires, and the figure in words."""

    fires: bool
    figure: str


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: The problem that it finds.
        metric: The curve to look at.
        threshold: When it fires, in words.
        flag: The flag to look at first.
        advice: What usually helps.
        check: Returns None without enough measurements.
    """

    name: str
    metric: str
    threshold: str
    flag: str
    advice: str
    check: Callable[[Curves], Finding | None]


@dataclass(frozen=True)
class Verdict:
    """A rule's verdict on a run."""

    rule: str
    state: State
    figure: str
    threshold: str
    metric: str
    flag: str
    advice: str

    def to_json(self) -> dict[str, Any]:
        """Return it as the page reads it."""
        return asdict(self)


class Curves:
    """The measured values of each metric, without gaps."""

    def __init__(self, metrics: MetricsFile) -> None:
        self._metrics = metrics

    def of(self, name: str) -> list[float]:
        """Return the measurements of a metric, in order; an infinite one is kept, a missing one is not."""
        return [value for value in self._metrics.column(name) if not math.isnan(value)]

    def ends(self, name: str) -> tuple[float, float] | None:
        """Return the means of the first and of the newest window; None if they would overlap."""
        values = self.of(name)
        if len(values) < 2 * WINDOW:
            return None
        return fmean(values[:WINDOW]), fmean(values[-WINDOW:])

    def success(self) -> tuple[float, float] | None:
        """Return success early and now: held-out accuracy if it was measured twice, else the mean reward.

        Of a weighted sum of rewards, only the part that says whether an answer is right counts: parts that pay for
        length or format say nothing about that.
        """
        sets = [values for name in evaluation_names(self._metrics.names) if len(values := self._success_in(name)) > 1]
        if sets:
            return fmean(values[0] for values in sets), fmean(values[-1] for values in sets)
        part = self._deciding_part("rollout/")
        return self.ends("rollout/reward" if part is None else part)

    def _success_in(self, accuracy: str) -> list[float]:
        part = self._deciding_part(accuracy.removesuffix("accuracy"))
        return self.of(accuracy if part is None else part)

    def _deciding_part(self, prefix: str) -> str | None:
        """Return the metric of the part that decides whether a sample passes; None without parts."""
        start = f"{prefix}reward_parts/"
        names = [name.removeprefix(start) for name in self._metrics.names if name.startswith(start)]
        part = deciding_part(names)
        return None if part is None else start + part

    def has_gained(self) -> bool | None:
        """Return whether success has grown by more than 0.02 (or 2 % of a larger scale); None if not measured."""
        ends = self.success()
        if ends is None:
            return None
        early, now = ends
        return now - early > 0.02 * max(1.0, abs(early), abs(now))


def _entropy(curves: Curves) -> Finding | None:
    ends, gained = curves.ends("train/entropy_loss"), curves.has_gained()
    if ends is None or gained is None:
        return None
    early, now = ends
    fires = now < 0.1 * early and not gained
    return Finding(fires, f"{now:.3g} nats per token, {_times(now, early)} the start's {early:.3g}")


def _clip_fraction(curves: Curves) -> Finding | None:
    ends = curves.ends("train/pg_clipfrac")
    return ends and Finding(ends[1] > 0.3, f"{ends[1]:.1%} of the tokens clipped")


def _importance_ratio(curves: Curves) -> Finding | None:
    ends = curves.ends("train/is_ratio")
    return ends and Finding(not 0.8 <= ends[1] <= 1.25, f"a mean ratio trainer / engine of {ends[1]:.3f}")


def _length(curves: Curves) -> Finding | None:
    ends, gained = curves.ends("rollout/response_length"), curves.has_gained()
    if ends is None or gained is None:
        return None
    early, now = ends
    return Finding(now > 1.5 * early and not gained, f"{now:.0f} tokens, {_times(now, early)} the start's {early:.0f}")


def _zero_variance(curves: Curves) -> Finding | None:
    ends, gained = curves.ends("rollout/zero_std_groups"), curves.has_gained()
    if ends is None or gained is None:
        return None
    # After a gain, groups lack spread because all of their answers are right.
    return Finding(ends[1] > 0.8 and not gained, f"{ends[1]:.1%} of the groups teach nothing")


def _truncated(curves: Curves) -> Finding | None:
    ends = curves.ends("rollout/truncated_fraction")
    if ends is None:
        return None
    early, now = ends  # a tenth is beyond the noise of 10 steps of 64 answers: 0.03 in the difference
    return Finding(now > 0.5 and now > 0.9 * early, f"{now:.1%} of the answers cut at the length limit")


def _log_prob_gap(curves: Curves) -> Finding | None:
    ends = curves.ends("train/train_rollout_logprob_abs_diff")
    return ends and Finding(ends[1] > 0.1, f"{ends[1]:.3g} nats per token")


def _gradient_spikes(curves: Curves) -> Finding | None:
    norms = curves.of("train/grad_norm")
    if len(norms) < 2 * WINDOW:
        return None
    newest, usual = max(norms[-WINDOW:]), median(norms)
    fires = math.isinf(newest) or newest > 10 * max(usual, 1e-12)
    return Finding(fires, f"a norm of {newest:.3g} among the last {WINDOW}, {_times(newest, usual)} the median")


def _times(value: float, of: float) -> str:
    return f"{value / of:.2g} times" if of else "more than 0 times"


RULES: tuple[Rule, ...] = (
    Rule(
        "Entropy collapse",
        "train/entropy_loss",
        "below a tenth of the start, and neither held-out accuracy nor reward has grown",
        "--entropy-coef",
        "raise --entropy-coef or --rollout-temperature, or lower --lr",
        _entropy,
    ),
    Rule(
        "Clip fraction",
        "train/pg_clipfrac",
        "above 30 % of the tokens",
        "--num-steps-per-rollout",
        "take fewer optimizer steps per iteration, or lower --lr",
        _clip_fraction,
    ),
    Rule(
        "Importance ratio",
        "train/is_ratio",
        "outside 0.8 to 1.25",
        "--use-tis",
        "correct with --use-tis, or lower --async-steps",
        _importance_ratio,
    ),
    Rule(
        "Length without accuracy",
        "rollout/response_length",
        "1.5 times the start, and neither held-out accuracy nor reward has grown",
        "--loss-aggregation",
        "read the longest answers; see --loss-aggregation and the reward function",
        _length,
    ),
    Rule(
        "Groups without spread",
        "rollout/zero_std_groups",
        "above 80 % of the groups, and neither held-out accuracy nor reward has grown",
        "--dynamic-sampling-filter-path",
        "choose easier prompts, more samples per prompt, or filter groups without spread",
        _zero_variance,
    ),
    Rule(
        "Truncated answers",
        "rollout/truncated_fraction",
        "above half of the answers, and not a tenth below the start",
        "--rollout-max-response-len",
        "raise --rollout-max-response-len, or reward short answers",
        _truncated,
    ),
    Rule(
        "Engine-trainer gap",
        "train/train_rollout_logprob_abs_diff",
        "above 0.1 nats per token",
        "--use-tis",
        "compare precision and sampling flags of engine and trainer; correct with --use-tis",
        _log_prob_gap,
    ),
    Rule(
        "Gradient spikes",
        "train/grad_norm",
        f"one of the last {WINDOW} above 10 times the median of the run",
        "--clip-grad",
        "lower --lr or --clip-grad, and read the answers of that step",
        _gradient_spikes,
    ),
)


def verdicts(metrics: MetricsFile) -> list[Verdict]:
    """Return the verdict of every rule, in the order of ``RULES``."""
    curves = Curves(metrics)
    return [_verdict(rule, rule.check(curves)) for rule in RULES]


def unhealthy(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return those that fire."""
    return [verdict for verdict in verdicts if verdict.state == "unhealthy"]


def _verdict(rule: Rule, finding: Finding | None) -> Verdict:
    figure = f"fewer than {2 * WINDOW} measurements" if finding is None else finding.figure
    state: State = "no data" if finding is None else "unhealthy" if finding.fires else "ok"
    return Verdict(rule.name, state, figure, rule.threshold, rule.metric, rule.flag, rule.advice)
