"""What the metrics of a run show: its curves, charts, figures and health, and whether it learns.

metrics.jsonl is read as columns, as far as it has grown.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, NamedTuple, cast

from miles.base.flags import count
from miles.config.choice import deciding_metric
from miles.objective.estimators import ESTIMATORS
from miles.objective.loss_types import LOSS_TYPES
from miles.objective.settings import LossArguments
from miles.observe import run_files
from miles.types.metrics import held_out_metrics

Settings = Mapping[str, Mapping[str, Any]]  # section to field to value, as run.json has them
READ_AT_ONCE = 1 << 24
_NUMBERS = {int, float}


class MetricsFile:
    """The metrics of a run, one column per name with one entry per step; NaN if a step lacks the metric.

    ``refresh`` reads only what was added. A file that was cut or replaced (a run that resumed) is read again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self._identity: int | None = None
        self._consumed = 0
        self._line = 0

    @property
    def steps(self) -> Sequence[int]:
        """The steps that have a row, in order."""
        return self._steps

    @property
    def names(self) -> list[str]:
        """The names of all metrics, sorted."""
        return sorted(self._columns)

    @property
    def revision(self) -> str:
        """A text that changes whenever the columns do."""
        return f"{self._identity}-{self._consumed}"

    def column(self, name: str) -> Sequence[float]:
        """Return one value per step; all NaN if no step has the metric."""
        return self._columns.get(name) or array("d", [math.nan]) * len(self._steps)

    def is_zero(self, name: str, least: float) -> bool:
        """Return whether every measurement is ``least`` or nearer to zero."""
        return all(not abs(value) > least for value in self.column(name))

    def refresh(self) -> bool:
        """Read the complete lines that were added; return whether anything changed.

        Raises:
            ValueError: A line is not a JSON object with a step; the message names file and line.
        """
        if not self._path.is_file():
            changed = bool(self._steps)
            self._forget()
            return changed
        with self._path.open("rb") as file:
            status = self._path.stat()
            if status.st_ino != self._identity or status.st_size < self._consumed:
                self._forget()
                self._identity = status.st_ino
            before = self._consumed
            file.seek(self._consumed)
            while chunk := file.read(READ_AT_ONCE):
                complete = chunk.rfind(b"\n") + 1
                if not complete:  # a line that is still being written
                    break
                lines = chunk[: complete - 1].split(b"\n")
                for number, line in enumerate(lines, self._line + 1):
                    try:
                        self._add(line, number)
                    except OverflowError as error:
                        raise ValueError(f"{self._path}:{number}: {error}; remove the line or the file") from error
                self._line += len(lines)  # not before: after a line that cannot be read, all of these are read again
                self._consumed += complete
                file.seek(self._consumed)
        return self._consumed != before

    def _add(self, line: bytes, number: int) -> None:
        row = run_files.parse_line(line.decode("utf-8", "replace"), self._path, number)
        step = row.pop("step", None)
        if not isinstance(step, int):
            raise ValueError(f"{self._path}:{number}: the row has no step; remove the line or the file")
        index = bisect_left(self._steps, step)
        if index == len(self._steps):
            self._steps.append(step)
            if row.keys() == self._columns.keys() and _NUMBERS.issuperset(map(type, row.values())):
                for name, value in row.items():  # most rows: every metric again
                    self._columns[name].append(value)
                return
            for column in self._columns.values():
                column.append(math.nan)
        elif self._steps[index] != step:
            self._steps.insert(index, step)
            for column in self._columns.values():
                column.insert(index, math.nan)
        for name, value in row.items():
            if value.__class__ is float or value.__class__ is int:  # not null, and no text
                if name not in self._columns:
                    self._columns[name] = array("d", [math.nan]) * len(self._steps)
                self._columns[name][index] = value

    def rows_between(self, first: float | None, last: float | None) -> range:
        """Return the positions of the steps from ``first`` to ``last``, both included; None: no bound."""
        begin = 0 if first is None else bisect_left(self._steps, math.ceil(first))
        end = len(self._steps) if last is None else bisect_left(self._steps, math.floor(last) + 1)
        return range(begin, max(begin, end))

    def points(self, names: Sequence[str], first: float | None, last: float | None, limit: int) -> dict[str, Any]:
        """Return ``{"steps": [...], "values": {name: [...]}}`` of a range of steps; None where nothing was measured.

        If the range has more than ``limit`` steps, it is cut into ``limit / 2`` parts, and each part gives the
        smallest and the largest value of each metric, in the order of their steps: no spike is lost. The steps are then
        only near the steps of the values (``"exact"`` is False), and ``"last"`` has the last value of each metric.
        """
        rows = self.rows_between(first, last)
        if len(rows) <= limit:
            steps = list(self._steps[rows.start : rows.stop])
            columns = {name: self.column(name)[rows.start : rows.stop] for name in names}
            return {"steps": steps, "values": {n: [_or_none(v) for v in c] for n, c in columns.items()}, "exact": True}
        count = max(limit // 2, 1)
        bounds = [rows.start + len(rows) * part // count for part in range(count + 1)]
        steps = [self._steps[i] for a, b in zip(bounds, bounds[1:], strict=False) for i in (a, (a + b) // 2)]
        values = {name: _extremes(self.column(name), bounds) for name in names}
        newest = {name: _or_none(_last(self.column(name)[rows.start : rows.stop])) for name in names}
        return {"steps": steps, "values": values, "exact": False, "last": newest}


def _extremes(column: Sequence[float], bounds: Sequence[int]) -> list[float | None]:
    """Return two values of each part: its smallest and its largest, in order; None, None if nothing was measured."""
    extremes: list[float | None] = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        part = [v for v in column[begin:end] if v == v]
        if not part:
            extremes += [None, None]
            continue
        low, high = min(part), max(part)
        pair = (low, high) if part.index(low) <= part.index(high) else (high, low)
        extremes += map(_or_none, pair)
    return extremes


def _last(column: Sequence[float]) -> float:
    """Return the last value that was measured; NaN if there is none."""
    return next((value for value in reversed(column) if value == value), math.nan)


def _or_none(value: float) -> float | None:
    """Return the value with six significant digits, None for a value that JSON cannot hold."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def to_json(value: Any) -> bytes:
    """Return strict JSON in UTF-8; a lone surrogate, which UTF-8 cannot hold, becomes its escape."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")


# The charts of the page: which metrics it shows, by question, under which name and unit.


QUESTIONS = {
    "learning": "Is it learning?",
    "stability": "Is it stable?",
    "engine": "What does generation do?",
    "time": "Where does the time go?",
}
SHARE = "share"  # the unit of values between 0 and 1
NOTHING = 1e-6  # a metric that stays below this is zero: a mean of float32 token losses has errors of this size
_CHARTS: dict[str, list[list[str]]] = tomllib.loads((files(__package__) / "charts.toml").read_text(encoding="utf-8"))
_ENGINE_PREFIXES = ("perf/", "engine/", "memory/", "weight_sync/", "rollout/staleness")
_BELOW_ZERO = ("train/pg_loss", "train/loss")

Chart = dict[str, Any]


def evaluation_names(names: Iterable[str]) -> list[str]:
    """Return the metrics of held-out reward, one per evaluation set."""
    return [*held_out_metrics(names).values()]


def _chart(question: str, title: str, unit: str, series: Mapping[str, str]) -> Chart:
    first = next(iter(series))
    return {
        "question": question,
        "title": title,
        "unit": unit,
        "series": [{"key": name, "label": label} for name, label in series.items()],
        "range": [0, 1] if unit == SHARE else None,
        "zero": first not in _BELOW_ZERO,
        "least": 0.0 if first == "train/lr" else NOTHING,
    }


def charts(names: Sequence[str], main: Sequence[str] = ()) -> list[Chart]:
    """Return the charts of the metrics ``names`` by question, the usual ones first; the seconds by phase are apart.

    Args:
        names: The metrics of a run, or of several.
        main: Metrics whose charts are the large ones at the top, in this order.
    """
    sets = {name: evaluation_set for evaluation_set, name in held_out_metrics(names).items()}
    charts = [_chart("learning", "Held-out reward", "reward, mean of an evaluation set", sets)] if sets else []
    rows = ((question, *row) for question, rows in _CHARTS.items() for row in rows)
    charts += [_chart(question, title, unit, {n: n}) for question, n, title, unit in rows if n in names]
    keys = {series["key"] for chart in charts for series in chart["series"]}
    for name in names:
        if name not in keys and not name.startswith("time/"):
            question = "engine" if name.startswith(_ENGINE_PREFIXES) else "learning"
            unit = SHARE if name.endswith(("_fraction", "_frac", "clipfrac")) else ""
            charts.append(_chart("stability" if name.startswith("train/") else question, name, unit, {name: name}))
    large = {name: place for place, name in enumerate(main)}
    for chart in charts:
        if (first := chart["series"][0]["key"]) in large:
            chart |= {"question": "main", "place": large[first]}
    return sorted(charts, key=lambda chart: chart.get("place", len(large)))


def run_charts(metrics: MetricsFile, settings: Settings) -> list[Chart]:
    """Return the charts of one run; charts of metrics that are zero throughout are marked ``"is_zero"``."""
    result = charts(metrics.names, main_metrics(metrics.names, settings))
    for chart in result:
        chart["is_zero"] = all(metrics.is_zero(series["key"], chart["least"]) for series in chart["series"])
    return result


def main_metrics(names: Sequence[str], settings: Settings) -> list[str]:
    """Return the two metrics that say most about whether a run learns."""
    held_out = evaluation_names(names)[:1]
    if not learns_from_rewards(settings):
        wanted = [*held_out_losses(names)[:1], "train/loss", *held_out, "train/grad_norm"]
    else:
        wanted = [*held_out, "rollout/reward", "rollout/response_length", "train/loss"]
    return [name for name in wanted if name in names][:2]


def held_out_losses(names: Iterable[str]) -> list[str]:
    """Return the metrics of held-out losses, one per evaluation set."""
    return sorted(name for name in names if name.startswith("eval/") and name.endswith("/loss"))


def number(value: float) -> str:
    """Return a value as people read it: four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def tiles(metrics: MetricsFile) -> list[dict[str, str]]:
    """Return the figures that summarize a run: label, value, remark."""
    tiles = []
    sets = {f"held-out {evaluation_set}": name for evaluation_set, name in held_out_metrics(metrics.names).items()}
    for label, name in {"reward": "rollout/reward", **sets}.items():
        values = [v for v in metrics.column(name) if math.isfinite(v)]
        if values:
            remark = f"from {number(values[0])}, best {number(max(values))}"
            tiles.append({"label": label, "value": number(values[-1]), "remark": remark})
    seconds = [v for v in metrics.column("time/step") if math.isfinite(v)]
    if seconds:
        remark = f"{number(fmean(seconds))} s per iteration"
        tiles.append({"label": "wall time", "value": _duration(sum(seconds)), "remark": remark})
    return tiles


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


# Health verdicts: rules over the curves of a run. Each gives its measurement, its threshold, and flags to look at.
#
# A rule compares the newest ``WINDOW`` measurements with its threshold, or with the first ``WINDOW`` of the run. It
# gives no verdict before ``2 * WINDOW`` measurements: early steps are noisy, and a run that starts badly may learn to
# do better. To add a rule, write a function from ``Curves`` to a ``Finding`` and add it to ``RULES``.


WINDOW = 10
NEAR = 0.7  # of a threshold: the rule may fire soon

State = Literal["ok", "may fire", "unhealthy", "no data"]


def setting(settings: Settings, name: str) -> Any:
    """Return the value of a setting, whatever its section; None if run.json lacks it."""
    return next((fields[name] for fields in settings.values() if name in fields), None)


def _loss(settings: Settings) -> LossArguments:
    """Return the settings of the objective, with defaults for settings that run.json lacks."""
    names = {field.name for field in dataclasses.fields(LossArguments)}
    return LossArguments(**{name: value for name, value in settings.get("loss", {}).items() if name in names})


def learns_from_rewards(settings: Settings) -> bool:
    """Return whether the loss uses advantages, as all but SFT's do."""
    return LOSS_TYPES[_loss(settings).loss_type].uses_advantages


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
    check: Callable[[Curves], Finding | None]
    judges: Callable[[Settings], bool] = learns_from_rewards


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

    def to_json(self) -> dict[str, Any]:
        """Return it as the page reads it."""
        return asdict(self)


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
        sets = [
            values
            for name in evaluation_names(self._metrics.names)
            if len(values := self.of(self._success_metric(name))) > 1
        ]
        if sets:
            return fmean(values[0] for values in sets), fmean(values[-1] for values in sets)
        part = deciding_metric(self._metrics.names, "rollout/")
        return self.ends("rollout/reward" if part is None else part)

    def _success_metric(self, metric: str) -> str:
        return deciding_metric(self._metrics.names, f"{metric.rpartition('/')[0]}/") or metric

    def judged(self, settings: Settings, held_out: bool = True) -> Curve:
        """Return the curve that shows whether the run learns: the held-out one, if it is wanted and measured twice."""
        if not learns_from_rewards(settings):
            losses = [name for name in held_out_losses(self._metrics.names) if len(self.of(name)) > 1]
            return Curve("held-out loss" if losses else "loss", -1, *self._mean(losses or ["train/loss"]))
        sets = [self._success_metric(name) for name in evaluation_names(self._metrics.names)]
        sets = [name for name in sets if len(self.of(name)) > 1]
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


def _entropy(curves: Curves) -> Finding | None:
    ends, gained = curves.ends("train/entropy_loss"), curves.has_gained()
    if ends is None or gained is None:
        return None
    early, now = ends
    level = 0.0 if gained or early <= 0 else 0.1 * early / max(now, 1e-12)
    return Finding(level, f"{now:.3g} nats per token, {_times(now, early)} the start's {early:.3g}")


def _clip_fraction(curves: Curves) -> Finding | None:
    ends = curves.ends("train/pg_clipfrac")
    return ends and Finding(ends[1] / 0.3, f"{ends[1]:.1%} of the tokens clipped")


def _importance_ratio(curves: Curves) -> Finding | None:
    ends = curves.ends("train/is_ratio")
    if ends is None:
        return None
    level = abs(math.log(max(ends[1], 1e-12))) / math.log(1.25)
    return Finding(level, f"a mean ratio trainer / engine of {ends[1]:.3f}")


def _length(curves: Curves) -> Finding | None:
    ends, gained = curves.ends("rollout/response_length"), curves.has_gained()
    if ends is None or gained is None:
        return None
    early, now = ends
    level = 0.0 if gained else (now - early) / (0.5 * early or math.inf)
    return Finding(level, f"{now:.0f} tokens, {_times(now, early)} the start's {early:.0f}")


def _zero_variance(curves: Curves) -> Finding | None:
    ends, gained = curves.ends("rollout/zero_std_groups"), curves.has_gained()
    if ends is None or gained is None:
        return None
    # After a gain, groups lack spread because all of their answers are right.
    return Finding(0.0 if gained else ends[1] / 0.8, f"{ends[1]:.1%} of the groups teach nothing")


def _truncated(curves: Curves) -> Finding | None:
    ends = curves.ends("rollout/truncated_fraction")
    if ends is None:
        return None
    early, now = ends  # a tenth is beyond the noise of 10 steps of 64 answers: 0.03 in the difference
    return Finding(now / 0.5 if now > 0.9 * early else 0.0, f"{now:.1%} of the answers cut at the length limit")


def _log_prob_gap(curves: Curves) -> Finding | None:
    ends = curves.ends("train/train_rollout_logprob_abs_diff")
    return ends and Finding(ends[1] / 0.1, f"{ends[1]:.3g} nats per token")


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


def _gradient_spikes(curves: Curves) -> Finding | None:
    norms = curves.of("train/grad_norm")
    if len(norms) < 2 * WINDOW:
        return None
    newest, usual = max(norms[-WINDOW:]), median(norms)
    level = newest / (10 * max(usual, 1e-12))
    return Finding(level, f"a norm of {newest:.3g} among the last {WINDOW}, {_times(newest, usual)} the median")


def _times(value: float, of: float) -> str:
    return f"{value / of:.2g} times" if of else "more than 0 times"


def _compares_answers(settings: Settings) -> bool:
    """Return whether a group whose answers have one reward teaches nothing."""
    loss = _loss(settings)
    return (
        learns_from_rewards(settings)
        and setting(settings, "n_samples_per_prompt") != 1
        and not loss.use_opd
        and ESTIMATORS[loss.advantage_estimator].smallest_group(loss) > 1
    )


_LOWER_RATE = Advice("--lr", "lower --lr")
_TIS = Advice("--use-tis", "correct with --use-tis", lambda settings: not setting(settings, "use_tis"))
_PRECISION = Advice("--bf16", "compare precision and sampling flags of engine and trainer")

RULES: tuple[Rule, ...] = (
    Rule(
        "Entropy collapse",
        "train/entropy_loss",
        "below a tenth of the start, and neither held-out reward nor reward has grown",
        (
            Advice("--entropy-coef", "raise --entropy-coef", lambda settings: not setting(settings, "entropy_target")),
            Advice("--rollout-temperature", "raise --rollout-temperature"),
            _LOWER_RATE,
        ),
        _entropy,
    ),
    Rule(
        "Clip fraction",
        "train/pg_clipfrac",
        "above 30 % of the tokens",
        (
            Advice(
                "--num-steps-per-rollout",
                "take fewer optimizer steps per iteration",
                lambda settings: setting(settings, "num_steps_per_rollout") != 1,
            ),
            _LOWER_RATE,
        ),
        _clip_fraction,
    ),
    Rule(
        "Importance ratio",
        "train/is_ratio",
        "outside 0.8 to 1.25",
        (
            _TIS,
            Advice("--async-steps", "lower --async-steps", lambda settings: setting(settings, "async_steps") != 0),
            _PRECISION,
        ),
        _importance_ratio,
    ),
    Rule(
        "Length without accuracy",
        "rollout/response_length",
        "1.5 times the start, and neither held-out reward nor reward has grown",
        (Advice("--loss-aggregation", "read the longest answers; see --loss-aggregation and the reward function"),),
        _length,
    ),
    Rule(
        "Groups without spread",
        "rollout/zero_std_groups",
        "above 80 % of the groups, and neither held-out reward nor reward has grown",
        (
            Advice(
                "--dynamic-sampling-filter-path",
                "filter groups without spread (--dynamic-sampling-filter-path)",
                lambda settings: setting(settings, "dynamic_sampling_filter_path") is None,
            ),
            Advice("--n-samples-per-prompt", "choose easier or harder prompts, or more samples per prompt"),
        ),
        _zero_variance,
        _compares_answers,
    ),
    Rule(
        "Truncated answers",
        "rollout/truncated_fraction",
        "above half of the answers, and not a tenth below the start",
        (Advice("--rollout-max-response-len", "raise --rollout-max-response-len, or reward short answers"),),
        _truncated,
    ),
    Rule(
        "Engine-trainer gap",
        "train/train_rollout_logprob_abs_diff",
        "above 0.1 nats per token",
        (_TIS, _PRECISION),
        _log_prob_gap,
    ),
    Rule(
        "Gradient spikes",
        "train/grad_norm",
        f"one of the last {WINDOW} above 10 times the median of the run",
        (
            Advice("--clip-grad", "lower --clip-grad", lambda settings: setting(settings, "clip_grad") != 0),
            Advice("--lr", "lower --lr, and read the answers of that step"),
        ),
        _gradient_spikes,
        lambda settings: True,
    ),
    Rule(
        "Flat reward",
        "rollout/reward",
        f"{4 * WINDOW} measurements or more that exclude a growth of 0.03, and held-out reward has not grown",
        (Advice("--lr", "read the best and the worst answers; raise --lr; or choose easier prompts"),),
        _flat_reward,
        lambda settings: learns_from_rewards(settings) and not setting(settings, "debug_rollout_only"),
    ),
)


def verdicts(metrics: MetricsFile, settings: Settings) -> list[Verdict]:
    """Return the verdicts of the rules that can judge a run of these settings, in the order of ``RULES``."""
    curves = Curves(metrics)
    judging = [rule for rule in RULES if rule.metric in metrics.names and rule.judges(settings)]
    return [_verdict(rule, rule.check(curves), settings) for rule in judging]


def unhealthy(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return those that fire."""
    return [verdict for verdict in verdicts if verdict.state == "unhealthy"]


def _verdict(rule: Rule, finding: Finding | None, settings: Settings) -> Verdict:
    figure, state = f"fewer than {2 * WINDOW} measurements", "no data"
    if finding is not None:
        level = finding.level
        figure, state = finding.figure, "unhealthy" if level > 1 else "may fire" if level > NEAR else "ok"
    advice = [each for each in rule.advice if each.helps(settings)]
    words = "; or ".join(each.words for each in advice)
    return Verdict(rule.name, cast(State, state), figure, rule.threshold, rule.metric, advice[0].flag, words)


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
    judgement, (first, *_, last) = _judge(curve, runs), curve.values
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
