"""metrics.jsonl as columns: read as far as it has grown, and served in ranges."""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from miles.observe import run_files
from miles.tasks.rewards.passing import deciding_part

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
        smallest and the largest value of each metric, in the order in which they occur: no spike is lost. The steps
        are then only near those of the values (``"exact"`` is False), and ``"last"`` has the last value of each metric.
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
    found: list[float | None] = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        part = [v for v in column[begin:end] if v == v]
        if not part:
            found += [None, None]
            continue
        low, high = min(part), max(part)
        pair = (low, high) if part.index(low) <= part.index(high) else (high, low)
        found += map(_or_none, pair)
    return found


def _last(column: Sequence[float]) -> float:
    """Return the last value that was measured; NaN if there is none."""
    return next((value for value in reversed(column) if value == value), math.nan)


def _or_none(value: float) -> float | None:
    """Return the value with six significant digits, None for what JSON cannot hold."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def to_json(value: Any) -> bytes:
    """Return strict JSON in UTF-8; a lone surrogate, which UTF-8 cannot hold, becomes its escape."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")


# Choose the curves of the page and the figures at its head.


# Metric, title, what the reader should know. They come first, in this order, if the run has them.
_LEARNING = (
    ("rollout/reward", "Reward", "mean of the iteration"),
    ("rollout/response_length", "Response length", "tokens, mean of the iteration"),
    ("rollout/truncated_fraction", "Truncated answers", "share of the iteration"),
    ("rollout/zero_std_groups", "Groups without spread", "share whose answers all have one reward"),
    ("train/pg_loss", "Policy loss", "aggregated as the objective says"),
    ("train/value_loss", "Value loss", "of the critic"),
    ("train/explained_variance", "Explained variance", "of the returns, by the critic"),
    ("train/entropy_loss", "Entropy", "nats per token"),
    ("train/pg_clipfrac", "Clip fraction", "share of tokens clipped"),
    ("train/ppo_kl", "KL of the update", "to the sampling policy"),
    ("train/kl_loss", "KL to the start", "to the reference model"),
    ("train/train_rollout_logprob_abs_diff", "Engine-trainer gap", "nats per token, absolute"),
    ("train/ess_ratio", "Effective sample size", "share of the samples"),
    ("train/grad_norm", "Gradient norm", "before clipping"),
    ("train/lr", "Learning rate", ""),
)
_ENGINE = (
    ("perf/tokens_per_second", "Throughput", "tokens per second"),
    ("perf/engine_busy", "Engine utilization", "share of the time with requests"),
    ("perf/engine_responses", "Responses in flight", "mean while the engine has requests"),
    ("perf/trainer_memory_gib", "Memory of the trainer", "GiB, of the fullest rank"),
    ("perf/trainer_memory_foreseen_gib", "Memory of the trainer, foreseen", "GiB, by a rehearsal"),
    ("perf/rollout_memory_gib", "Memory of the rollout process", "GiB"),
    ("rollout/staleness", "Staleness", "weight versions behind, mean over tokens"),
    ("rollout/staleness_max", "Greatest staleness", "weight versions behind"),
    ("rollout/mixed_version_samples", "Mixed weight versions", "share of samples"),
)
_ENGINE_PREFIXES = ("perf/", "engine/", "memory/", "weight_sync/", "rollout/staleness")
_MAY_BE_NEGATIVE = ("train/pg_loss", "train/loss")

Chart = dict[str, Any]


def evaluation_names(names: Iterable[str]) -> list[str]:
    """Return the metrics of held-out accuracy, one per evaluation set."""
    return sorted(name for name in names if name.startswith("eval/") and name.endswith("/accuracy"))


def set_name(accuracy: str) -> str:
    """Return the name of the evaluation set that a metric of ``evaluation_names`` is of."""
    return accuracy.removeprefix("eval/").removesuffix("/accuracy")


def _chart(section: str, title: str, note: str, names: Sequence[str], labels: Sequence[str]) -> Chart:
    series = [{"key": name, "label": label} for name, label in zip(names, labels, strict=True)]
    return {
        "section": section,
        "title": title,
        "note": note,
        "series": series,
        "zero": names[0] not in _MAY_BE_NEGATIVE,
    }


def charts(names: Sequence[str]) -> list[Chart]:
    """Return the charts of the metrics ``names``, the usual ones first; the seconds by phase are apart."""
    held_out = evaluation_names(names)
    charts: list[Chart] = []
    if held_out:
        sets = list(map(set_name, held_out))
        charts.append(_chart("learning", "Held-out accuracy", "evaluation sets", held_out, sets))
    charts += [_chart("learning", title, note, [n], [n]) for n, title, note in _LEARNING if n in names]
    charts += [_chart("engine", title, note, [n], [n]) for n, title, note in _ENGINE if n in names]
    shown = {series["key"] for chart in charts for series in chart["series"]}
    for name in names:
        if name not in shown and not name.startswith("time/"):
            section = "engine" if name.startswith(_ENGINE_PREFIXES) else "more"
            charts.append(_chart(section, name, "", [name], [name]))
    return charts


def number(value: float) -> str:
    """Return a value as people read it: four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def tiles(metrics: MetricsFile) -> list[dict[str, str]]:
    """Return the figures that summarize a run: label, value, remark."""
    done = metrics.steps[-1] if metrics.steps else 0  # rows of a long run may be thinned; that of step 0 is no step
    tiles = [_tile("steps", str(done), "")]
    sets = [(name, f"held-out {set_name(name)}") for name in evaluation_names(metrics.names)]
    for name, label in [("rollout/reward", "reward"), *sets]:
        values = [v for v in metrics.column(name) if math.isfinite(v)]
        if values:
            remark = f"from {number(values[0])}, best {number(max(values))}"
            tiles.append(_tile(label, number(values[-1]), remark))
    seconds = [v for v in metrics.column("time/step") if math.isfinite(v)]
    if seconds:
        total = sum(seconds)
        tiles.append(_tile("wall time", _duration(total), f"{number(total / len(seconds))} s per iteration"))
    return tiles


def _tile(label: str, value: str, remark: str) -> dict[str, str]:
    return {"label": label, "value": value, "remark": remark}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


# Health verdicts: rules over the curves of a run. Each says what it measured, its threshold, and the flag to look at.
#
# A rule compares the newest ``WINDOW`` measurements with its threshold, or with the first ``WINDOW`` of the run. It
# says
# nothing before ``2 * WINDOW`` measurements: early steps are noisy, and a run that starts badly may be learning to do
# better. To add a rule, write a function from ``Curves`` to a ``Finding`` and add it to ``RULES``.


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
