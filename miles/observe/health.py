"""Health verdicts: rules over the curves of a run. Each gives its measurement, its threshold, and flags to look at.

A rule compares the newest ``WINDOW`` measurements with its threshold, or with the first ``WINDOW`` of the run. It
gives no verdict before ``2 * WINDOW`` measurements: early steps are noisy, and a run that starts badly may learn to
do better. To add a rule, write a function from ``Curves`` to a ``Finding`` with ``_rule``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median
from typing import Any, Literal, NamedTuple, TypeAlias

from miles.base.flags import count
from miles.config.choice import deciding_metric
from miles.objective.estimators import ESTIMATORS
from miles.observe.charts import Settings, evaluation_names, held_out_losses, learns_from_rewards, loss_of, number
from miles.observe.metrics_file import MetricsFile

WINDOW = 10
NEAR = 0.7  # of a threshold: the rule may fire soon

State = Literal["ok", "may fire", "unhealthy", "no data"]


def setting(settings: Settings, name: str) -> Any:
    """Return the value of a setting, whatever its section; None if run.json lacks it."""
    return next((fields[name] for fields in settings.values() if name in fields), None)


@dataclass(frozen=True)
class Finding:
    """The result of a rule.

    Attributes:
        level: The figure as a fraction of the threshold; above 1 the rule fires.
        figure: The figure in words.
    """

    level: float
    figure: str


@dataclass(frozen=True)
class Advice:
    """A remedy that usually helps: a flag, and when it can.

    Attributes:
        flag: The flag to look at.
        words: What to do with it.
        helps: Whether it can help a run of these settings.
    """

    flag: str
    words: str
    helps: Callable[[Settings], bool] = lambda settings: True


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: The problem that it finds.
        metric: The curve to look at.
        threshold: When it fires, in words.
        advice: The remedies that usually help, the most likely first. One of them always can.
        check: Returns None without enough measurements.
        judges: Whether it states something about a run of these settings that has its metric.
    """

    name: str
    metric: str
    threshold: str
    advice: tuple[Advice, ...]
    check: Check
    judges: Callable[[Settings], bool]


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

    @property
    def sentence(self) -> str:
        """The rule, what it measured, and what to do."""
        return f"{self.rule}: {self.figure}; {self.advice} ({self.flag})"


class Curve(NamedTuple):
    """Measurements that show whether a run learns; ``sign`` is 1 if more is better, else -1."""

    name: str
    sign: int
    steps: list[int]
    values: list[float]


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

        Of a weighted sum of rewards, only the part that states whether an answer is right counts: parts that pay for
        length or format say nothing about that.
        """
        sets = [self.of(name) for name in self._held_out_success()]
        if sets:
            return fmean(values[0] for values in sets), fmean(values[-1] for values in sets)
        part = deciding_metric(self._metrics.names, "rollout/")
        return self.ends("rollout/reward" if part is None else part)

    def _held_out_success(self) -> list[str]:
        """Return the metric of success of each evaluation set that was measured twice."""
        known = self._metrics.names
        names = [deciding_metric(known, f"{name.rpartition('/')[0]}/") or name for name in evaluation_names(known)]
        return [name for name in names if len(self.of(name)) > 1]

    def judged(self, settings: Settings, held_out: bool = True) -> Curve:
        """Return the curve that shows whether the run learns: the held-out one, if it is wanted and measured twice."""
        if not learns_from_rewards(settings):
            losses = [name for name in held_out_losses(self._metrics.names) if len(self.of(name)) > 1]
            return Curve("held-out loss" if losses else "loss", -1, *self._mean(losses or ["train/loss"]))
        sets = self._held_out_success()
        if sets and held_out:
            several = f" of {len(sets)} sets" if len(sets) > 1 else ""
            return Curve(f"held-out reward{several}", 1, *self._mean(sets))
        reward = deciding_metric(self._metrics.names, "rollout/") or "rollout/reward"
        if reward in self._metrics.names:
            return Curve("reward", 1, *self._mean([reward]))
        return Curve("loss", -1, *self._mean(["train/loss"]))

    def _mean(self, names: Sequence[str]) -> tuple[list[int], list[float]]:
        """Return the steps that have all of the metrics, and the mean of these there."""
        rows = zip(*(self._metrics.column(name) for name in names), strict=True)
        means = ((step, sum(row) / len(names)) for step, row in zip(self._metrics.steps, rows, strict=True))
        finite = [(step, value) for step, value in means if math.isfinite(value)]
        return [step for step, _ in finite], [value for _, value in finite]

    def has_gained(self) -> bool | None:
        """Return whether success has grown by more than 0.02 (or 2 % of a larger scale); None if not measured."""
        ends = self.success()
        if ends is None:
            return None
        early, now = ends
        return now - early > 0.02 * max(1.0, abs(early), abs(now))


def _times(value: float, of: float) -> str:
    return f"{value / of:.2g} times" if of else "more than 0 times"


def _compares_answers(settings: Settings) -> bool:
    """Return whether a group whose answers have one reward teaches nothing."""
    loss = loss_of(settings)
    return (
        learns_from_rewards(settings)
        and setting(settings, "n_samples_per_prompt") != 1
        and not loss.use_opd
        and ESTIMATORS[loss.advantage_estimator].smallest_group(loss) > 1
    )


Check: TypeAlias = Callable[[Curves], Finding | None]
RULES: list[Rule] = []
_LOWER_RATE = Advice("--lr", "lower --lr")
_TIS = Advice("--use-tis", "correct with --use-tis", lambda settings: not setting(settings, "use_tis"))
_PRECISION = Advice("--bf16", "compare precision and sampling flags of engine and trainer")


def _rule(
    name: str,
    metric: str,
    threshold: str,
    *advice: Advice,
    judges: Callable[[Settings], bool] = learns_from_rewards,
) -> Callable[[Check], Check]:
    """Add the function below to ``RULES`` as the check of a rule."""

    def add(check: Check) -> Check:
        RULES.append(Rule(name, metric, threshold, advice, check, judges))
        return check

    return add


@_rule(
    "Entropy collapse",
    "train/entropy_loss",
    "below a tenth of the start, and neither held-out reward nor reward has grown",
    Advice("--entropy-coef", "raise --entropy-coef", lambda settings: not setting(settings, "entropy_target")),
    Advice("--rollout-temperature", "raise --rollout-temperature"),
    _LOWER_RATE,
)
def _entropy(curves: Curves) -> Finding | None:
    ends, gained = curves.ends("train/entropy_loss"), curves.has_gained()
    if ends is None or gained is None:
        return None
    early, now = ends
    level = 0.0 if gained or early <= 0 else 0.1 * early / max(now, 1e-12)
    return Finding(level, f"{now:.3g} nats per token, {_times(now, early)} the start's {early:.3g}")


@_rule(
    "Clip fraction",
    "train/pg_clipfrac",
    "above 30 % of the tokens",
    Advice(
        "--num-steps-per-rollout",
        "take fewer optimizer steps per iteration",
        lambda settings: setting(settings, "num_steps_per_rollout") != 1,
    ),
    _LOWER_RATE,
)
def _clip_fraction(curves: Curves) -> Finding | None:
    ends = curves.ends("train/pg_clipfrac")
    return ends and Finding(ends[1] / 0.3, f"{ends[1]:.1%} of the tokens clipped")


@_rule(
    "Importance ratio",
    "train/is_ratio",
    "outside 0.8 to 1.25",
    _TIS,
    Advice("--async-steps", "lower --async-steps", lambda settings: setting(settings, "async_steps") != 0),
    _PRECISION,
)
def _importance_ratio(curves: Curves) -> Finding | None:
    ends = curves.ends("train/is_ratio")
    if ends is None:
        return None
    level = abs(math.log(max(ends[1], 1e-12))) / math.log(1.25)
    return Finding(level, f"a mean ratio trainer / engine of {ends[1]:.3f}")


@_rule(
    "Length without accuracy",
    "rollout/response_length",
    "1.5 times the start, and neither held-out reward nor reward has grown",
    Advice("--loss-aggregation", "read the longest answers; see --loss-aggregation and the reward function"),
)
def _length(curves: Curves) -> Finding | None:
    ends, gained = curves.ends("rollout/response_length"), curves.has_gained()
    if ends is None or gained is None:
        return None
    early, now = ends
    level = 0.0 if gained else (now - early) / (0.5 * early or math.inf)
    return Finding(level, f"{now:.0f} tokens, {_times(now, early)} the start's {early:.0f}")


@_rule(
    "Groups without spread",
    "rollout/zero_std_groups",
    "above 80 % of the groups, and neither held-out reward nor reward has grown",
    Advice(
        "--dynamic-sampling-filter-path",
        "filter groups without spread (--dynamic-sampling-filter-path)",
        lambda settings: setting(settings, "dynamic_sampling_filter_path") is None,
    ),
    Advice("--n-samples-per-prompt", "choose easier or harder prompts, or more samples per prompt"),
    judges=_compares_answers,
)
def _zero_variance(curves: Curves) -> Finding | None:
    ends, gained = curves.ends("rollout/zero_std_groups"), curves.has_gained()
    if ends is None or gained is None:
        return None
    # After a gain, groups lack spread because all of their answers are right.
    return Finding(0.0 if gained else ends[1] / 0.8, f"{ends[1]:.1%} of the groups teach nothing")


@_rule(
    "Truncated answers",
    "rollout/truncated_fraction",
    "above half of the answers, and not a tenth below the start",
    Advice("--rollout-max-response-len", "raise --rollout-max-response-len, or reward short answers"),
)
def _truncated(curves: Curves) -> Finding | None:
    ends = curves.ends("rollout/truncated_fraction")
    if ends is None:
        return None
    early, now = ends  # a tenth is beyond the noise of 10 steps of 64 answers: 0.03 in the difference
    return Finding(now / 0.5 if now > 0.9 * early else 0.0, f"{now:.1%} of the answers cut at the length limit")


@_rule(
    "Engine-trainer gap",
    "train/train_rollout_logprob_abs_diff",
    "above 0.1 nats per token",
    _TIS,
    _PRECISION,
)
def _log_prob_gap(curves: Curves) -> Finding | None:
    ends = curves.ends("train/train_rollout_logprob_abs_diff")
    return ends and Finding(ends[1] / 0.1, f"{ends[1]:.3g} nats per token")


@_rule(
    "Gradient spikes",
    "train/grad_norm",
    f"one of the last {WINDOW} above 10 times the median of the run",
    Advice("--clip-grad", "lower --clip-grad", lambda settings: setting(settings, "clip_grad") != 0),
    Advice("--lr", "lower --lr, and read the answers of that step"),
    judges=lambda settings: True,
)
def _gradient_spikes(curves: Curves) -> Finding | None:
    norms = curves.of("train/grad_norm")
    if len(norms) < 2 * WINDOW:
        return None
    newest, usual = max(norms[-WINDOW:]), median(norms)
    level = newest / (10 * max(usual, 1e-12))
    return Finding(level, f"a norm of {newest:.3g} among the last {WINDOW}, {_times(newest, usual)} the median")


@_rule(
    "Flat reward",
    "rollout/reward",
    f"{4 * WINDOW} measurements or more that exclude a growth of 0.03, and held-out reward has not grown",
    Advice("--lr", "read the best and the worst answers; raise --lr; or choose easier prompts"),
    judges=lambda settings: learns_from_rewards(settings) and not setting(settings, "debug_rollout_only"),
)
def _flat_reward(curves: Curves) -> Finding | None:
    rewards = curves.of("rollout/reward")
    if len(rewards) < 4 * WINDOW or not all(map(math.isfinite, rewards)):
        return None
    trend = Trend.of(rewards, most=len(rewards))
    scale = max(1.0, abs(trend.early), abs(trend.now))
    most = trend.now - trend.early + 2 * trend.noise
    excused = curves.has_gained() or (trend.early >= 0.95 and max(rewards) <= 1)
    level = 0.0 if excused else 0.03 * scale / max(most, 1e-12)
    return Finding(level, f"a reward of {trend.now:.3g} after {trend.early:.3g}, means of {trend.width}")


def verdicts(metrics: MetricsFile, settings: Settings) -> list[Verdict]:
    """Return the verdicts of the rules that can judge a run of these settings, in the order of ``RULES``."""
    curves = Curves(metrics)
    judging = [rule for rule in RULES if rule.metric in metrics.names and rule.judges(settings)]
    return [_verdict(rule, rule.check(curves), settings) for rule in judging]


def unhealthy(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts of rules that fire."""
    return [verdict for verdict in verdicts if verdict.state == "unhealthy"]


def _verdict(rule: Rule, finding: Finding | None, settings: Settings) -> Verdict:
    state: State = "no data"
    figure = f"fewer than {2 * WINDOW} measurements"
    if finding is not None:
        state = "unhealthy" if finding.level > 1 else "may fire" if finding.level > NEAR else "ok"
        figure = finding.figure
    advice = [each for each in rule.advice if each.helps(settings)]
    words = "; or ".join(each.words for each in advice)
    return Verdict(rule.name, state, figure, rule.threshold, rule.metric, advice[0].flag, words)


# Is it learning? One sentence from the curve that shows most.


ENOUGH = 8  # measurements of a curve that has noise; two of a held-out set are enough


@dataclass(frozen=True)
class Trend:
    """How a curve went, better being larger: means of its beginning, of its end, and of its best stretch.

    ``noise`` is the standard error of the difference of two such means, from second differences, which a steady trend
    does not change: their variance is 6 times the variance of independent noise.
    """

    early: float
    now: float
    best: float
    best_at: int
    noise: float
    width: int  # measurements in a mean

    @classmethod
    def of(cls, values: Sequence[float], most: int = WINDOW) -> Trend:
        """Return the trend of measurements without gaps, from means of ``most`` or a quarter of them."""
        n = max(1, min(most, len(values) // 4))
        sums = list(accumulate(values, initial=0.0))
        means = [(after - before) / n for before, after in zip(sums, sums[n:], strict=False)]
        bends = [(a - 2 * b + c) ** 2 for a, b, c in zip(values, values[1:], values[2:], strict=False)]
        best = max(range(len(means)), key=means.__getitem__)
        noise = math.sqrt(fmean(bends) / 6 * 2 / n) if bends else 0.0
        return cls(means[0], means[-1], means[best], best + n - 1, noise, n)


@dataclass(frozen=True)
class Judgement:
    """Whether a run learns: ``is_learning`` is None if that cannot be said, and the sentence states why."""

    is_learning: bool | None
    sentence: str


def judge(metrics: MetricsFile, settings: Settings, runs: bool, total_steps: int) -> Judgement:
    """Return whether the run learns, in one sentence.

    Supervised fine-tuning is judged by its loss, held-out if that is measured, and other runs by success: the held-out
    sets if they were measured twice, else the reward. If too few held-out measurements rise, the reward decides.

    Args:
        metrics: Its metrics.
        settings: Its settings.
        runs: Whether it still runs.
        total_steps: The optimizer steps that it is to have.
    """
    done = metrics.steps[-1] if metrics.steps else 0
    if not done:
        return Judgement(None, "No step has finished yet." if runs else "No step has finished.")
    curves = Curves(metrics)
    curve = curves.judged(settings)
    if setting(settings, "debug_rollout_only"):
        figures = f" Its {curve.name} is {number(fmean(curve.values))} on average." if curve.values else ""
        if alike := curves.of("rollout/zero_std_groups"):
            share = f"{fmean(alike):.0%} of the groups have" if any(alike) else "No group has"
            figures += f" {share} the same reward for all answers, which would teach nothing."
        return Judgement(None, f"It only generates (--debug-rollout-only); nothing is trained.{figures}")
    if not curve.values:
        return Judgement(None, "It measures no reward and no loss that tells whether it learns.")
    if len(curve.values) < (2 if curve.name.startswith("held-out") else ENOUGH):
        early = f"Too early to tell: {done} of {total_steps} steps are done."
        return Judgement(None, early if done < total_steps else f"Too short to tell: it had {count(done, 'step')}.")
    judgement = _judge(curve, runs)
    first, last = curve.values[0], curve.values[-1]
    if judgement.is_learning is not None or last <= first:
        return judgement
    rewards = curves.judged(settings, held_out=False)
    by_reward = _judge(rewards, runs) if len(rewards.values) >= ENOUGH else judgement
    if not by_reward.is_learning:
        return judgement
    also = f"{curve.name} rose from {first:.3g} to {last:.3g} in {count(len(curve.values), 'measurement')}"
    return Judgement(True, f"{by_reward.sentence[:-1]}; {also}.")


def _judge(curve: Curve, runs: bool) -> Judgement:
    """Return what one curve, with enough measurements, states about the run."""
    name, sign, steps, values = curve
    trend = Trend.of([sign * value for value in values])
    scale = max(abs(trend.early), abs(trend.now), 1.0 if sign > 0 else 0.0)
    # Of flat curves with noise fewer than 1 % pass this from ENOUGH measurements on, by simulation.
    least = (0.02 if len(values) > 3 else 0.1) * scale + 4 * trend.noise
    early, now, best = (f"{sign * value:.3g}" for value in (trend.early, trend.now, trend.best))
    up, down = ("rose", "fell") if sign > 0 else ("fell", "rose")
    if trend.best - trend.now > max(least, 0.3 * (trend.best - trend.early)):
        verb = "is getting worse" if runs else "got worse"
        return Judgement(False, f"It {verb}: {name} {down} from {best} at step {steps[trend.best_at]} to {now}.")
    if trend.now - trend.early > least:
        means = f" (means of {trend.width})" if trend.width > 1 else ""
        return Judgement(True, f"It {'is learning' if runs else 'learned'}: {name} {up} from {early} to {now}{means}.")
    if len(set(values)) == 1:
        figures = f"{name} has been {now} in every measurement"
    else:
        figures = f"{name} is {now}, and was {early} at the start"
    if sign > 0 and trend.early >= 0.95 and max(values) <= 1:
        return Judgement(None, f"Little is left to learn: {figures}.")
    rise = trend.now - trend.early
    if rise > 0.1 * scale or (rise > 0 and len(values) < ENOUGH):  # large, but within the noise
        return Judgement(None, f"{count(len(values), 'measurement')} cannot tell: {figures}.")
    return Judgement(False, f"It {'is not learning' if runs else 'did not learn'}: {figures}.")
