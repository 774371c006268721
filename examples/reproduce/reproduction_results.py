"""Keep what a sweep of a reproduction has measured, and make its picture and tables from that.

python examples/reproduce/reproduction_results.py show SWEEP…   write runs.csv there, and print its tables
python examples/reproduce/reproduction_results.py keep SWEEP…   write runs.csv beside this file, then draw
python examples/reproduce/reproduction_results.py draw          make all pictures and tables from each runs.csv

``runs.csv`` has one row per run and iteration. A figure of a run is the mean of a column over its last iterations, or
over all; figures are compared seed by seed with those of the baseline, the first variant. Intervals are 95 % bootstrap
intervals of the mean over seeds, those of ``miles sweep``.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miles.sweep.statistics import Interval, band, over_seeds, paired_difference

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "reproductions.md"
LAST = 10  # iterations of a figure "at the end"
AGAIN = "again"  # how the name of the variant ends that is the baseline with other seeds
BLOCK = re.compile(
    r"(?<=<!-- measured by examples/reproduce/reproduction_results\.py -->\n).*?(?=<!-- end -->)", re.DOTALL
)
CAPTION = """![Curves of the runs](curves.png)

Lines are means over seeds, bands their 95 % intervals at each iteration.
"""
NOT_RUN = "The sweep is defined, and its runs have not been made yet.\n"
LONG = 16  # tokens from which an answer counts as long

Answer = Mapping[str, Any]  # of samples.jsonl
Row = dict[str, float]  # of an iteration


@dataclass(frozen=True)
class Part:
    """Which iterations of a run a figure is the mean of."""

    words: str
    rows: slice


AT_END = Part(f"mean of the last {LAST} iterations", slice(-LAST, None))
OVERALL = Part("mean of all iterations", slice(None))
AT_START = Part("in the first iteration", slice(1))


@dataclass(frozen=True)
class Figure:
    """A figure of the table of a reproduction.

    Attributes:
        column: The column of runs.csv.
        words: Its name in tables.
        part: The iterations of which it is the mean.
        is_claim: Whether it is the effect that docs/reproductions.md names.
    """

    column: str
    words: str
    part: Part = AT_END
    is_claim: bool = False


@dataclass(frozen=True)
class Reproduction:
    """What is kept, drawn and claimed of a sweep.

    Attributes:
        title: What docs/reproductions.md calls it.
        figures: The rows of its table; each column has a panel of the picture.
    """

    title: str
    figures: tuple[Figure, ...]


ACCURACY = Figure("accuracy", "accuracy of the training answers")
REPRODUCTIONS = {
    "drgrpo": Reproduction(
        "what dividing by the length does to wrong answers (Dr.GRPO)",
        (
            Figure("length_wrong", "length of wrong answers, tokens", is_claim=True),
            Figure("length_right", "length of right answers, tokens"),
            ACCURACY,
            Figure("long_weight", f"share of wrong answers' weight that is on those of {LONG} tokens or more", OVERALL),
        ),
    ),
    "cliphigher": Reproduction(
        "clip-higher of DAPO, with 8 steps per iteration",
        (
            Figure("entropy", "entropy, nats per token", OVERALL, is_claim=True),
            Figure("between", "share of the ratios of good answers in (1.2, 1.28]", OVERALL),
            Figure("clipped", "clipped tokens, a fraction", OVERALL),
            ACCURACY,
        ),
    ),
    "topp": Reproduction(
        "top-p with and without the engine's support replayed in the trainer",
        (
            Figure("log_prob", "log-prob of the drawn tokens, nats", AT_START),
            Figure("entropy", "entropy, nats per token", is_claim=True),
            Figure("length", "length, tokens"),
            ACCURACY,
            Figure("held_out", "held-out accuracy at the end"),
        ),
    ),
    "dynamic": Reproduction(
        "dynamic sampling: groups of equal rewards are replaced",
        (
            Figure("held_out", "held-out accuracy at the end", is_claim=True),
            Figure("zero_std", "groups of equal rewards among those generated, a fraction", OVERALL),
            Figure("tokens", "generated tokens per iteration", OVERALL),
        ),
    ),
    "aggregation": Reproduction(
        "four aggregation modes on answers whose lengths vary by ten times",
        (
            Figure("length", "length, tokens", is_claim=True),
            Figure("length_wrong", "length of wrong answers, tokens"),
            ACCURACY,
            Figure("long_share", f"share of the gradient's weight on answers of {LONG} tokens or more", OVERALL),
        ),
    ),
    "offpolicy": Reproduction(
        "stale weights, with four corrections",
        (
            Figure("accuracy", "accuracy of the training answers", is_claim=True),
            Figure("staleness", "age of the weights that sampled, iterations", OVERALL),
            Figure("far", "share of ratios outside [0.5, 2], trainer's to engine's probability", OVERALL),
            Figure("effective", "effective sample size of the ratios, a fraction of the tokens", OVERALL),
            Figure("gap", "mean difference of the log-probs, nats", OVERALL),
        ),
    ),
}


def _mean(values: Iterable[float]) -> float:
    found = [value for value in values if math.isfinite(value)]
    return math.fsum(found) / len(found) if found else math.nan


def _length(answer: Answer) -> int:
    return len(answer["rollout_log_probs"])


def _long_part(answers: Sequence[Answer]) -> float:
    """Return the share of ``Σ |A| length / denominator`` that is of long answers; its tokens weigh the same."""
    weights = [(abs(a["advantage"]) * _length(a) / a["denominator"], _length(a) >= LONG) for a in answers]
    total = math.fsum(weight for weight, _ in weights)
    return math.fsum(weight for weight, is_long in weights if is_long) / total if total else math.nan


def _between(answers: Sequence[Answer]) -> float:
    """Return the share of the tokens of answers with a positive advantage whose ratio is in (1.2, 1.28]."""
    good = [a for a in answers if a["advantage"] > 0]
    ratios = [ratio for a in good for ratio in a.get("ratios") or [1.0] * _length(a)]  # none are stored if all are 1
    return _mean(1.2 < ratio <= 1.28 for ratio in ratios)


def _far(answers: Sequence[Answer]) -> float:
    """Return the share of the tokens whose ratio of the trainer's to the engine's probability is outside [0.5, 2]."""
    pairs = (zip(a["log_probs"], a["rollout_log_probs"], strict=True) for a in answers if a.get("log_probs"))
    return _mean(abs(trainer - engine) > math.log(2) for found in pairs for trainer, engine in found)


# Columns of an iteration, of its answers and of the metrics of its steps.
OF_ANSWERS: Mapping[str, Callable[[Sequence[Answer]], float]] = {
    "accuracy": lambda answers: _mean(a["reward"] for a in answers),
    "length": lambda answers: _mean(map(_length, answers)),
    "length_wrong": lambda answers: _mean(_length(a) for a in answers if a["reward"] == 0),
    "length_right": lambda answers: _mean(_length(a) for a in answers if a["reward"] == 1),
    "long_weight": lambda answers: _long_part([a for a in answers if a["reward"] == 0]),
    "long_share": _long_part,
    "log_prob": lambda answers: _mean(value for a in answers for value in a["rollout_log_probs"]),
    "between": _between,
    "far": _far,
}
OF_METRICS = {
    "entropy": "train/entropy_loss",
    "clipped": "train/pg_clipfrac",
    "zero_std": "rollout/zero_std_groups",
    "tokens": "rollout/tokens",
    "held_out": "eval/heldout/accuracy",
    "staleness": "rollout/staleness",
    "effective": "train/ess_ratio",
    "gap": "train/train_rollout_logprob_abs_diff",
}
IF_ABSENT = {"staleness": 0.0}  # a synchronous run has no such metric


def iterations(run: Path, columns: Sequence[str]) -> list[Row]:
    """Return the rows of a run: one per iteration, with the columns that it measured."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    answers: dict[int, list[Answer]] = defaultdict(list)
    with (run / "samples.jsonl").open(encoding="utf-8") as file:
        for line in file:
            answer = json.loads(line)
            answers[answer["rollout_id"]].append(answer)
    rows, first = [], 1
    for number, last in enumerate(sorted(answers), start=1):
        steps = [row for row in metrics if first <= row["step"] <= last]
        row: Row = {"iteration": number}
        for column in columns:
            if column in OF_ANSWERS:
                row[column] = OF_ANSWERS[column](answers[last])
            else:
                found = _mean(step.get(OF_METRICS[column], math.nan) for step in steps)
                row[column] = IF_ABSENT.get(column, found) if math.isnan(found) else found
        rows.append(row)
        first = last + 1
    return rows


def keep(folder: Path, into: Path) -> None:
    """Write ``into``/runs.csv of the sweep in ``folder``, whose name is that of its reproduction."""
    name = folder.name
    columns = list(dict.fromkeys(figure.column for figure in REPRODUCTIONS[name].figures))
    found = json.loads((folder / "table.json").read_text(encoding="utf-8"))
    finished = [run for run in found["runs"] if run["is_finished"]]
    with (into / "runs.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["variant", "seed", "seconds", "iteration", *columns])
        for run in finished:
            place = folder / run["variant"] / f"seed-{run['seed']}"
            attempts = json.loads((place / "sweep-run.json").read_text(encoding="utf-8"))["attempts"]
            for row in iterations(place, columns):
                values = [f"{row[column]:.4g}" if math.isfinite(row[column]) else "" for column in columns]
                seconds = f"{attempts[-1]['seconds']:.1f}"
                writer.writerow([run["variant"], run["seed"], seconds, row["iteration"], *values])


Runs = dict[str, dict[int, list[dict[str, float]]]]  # by variant and seed, the rows in order


def read(folder: Path) -> Runs:
    """Return the runs of ``folder``/runs.csv; NaN if a column has no value."""
    runs: Runs = defaultdict(lambda: defaultdict(list))
    with (folder / "runs.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            variant, seed = row.pop("variant"), int(row.pop("seed"))
            runs[variant][seed].append({key: float(text) if text else math.nan for key, text in row.items()})
    return runs


def of_runs(runs: Mapping[int, Sequence[Mapping[str, float]]], figure: Figure) -> dict[int, float]:
    """Return a figure of each run, by seed."""
    return {seed: _figure_of([row[figure.column] for row in rows], figure.part) for seed, rows in runs.items()}


def _figure_of(values: Sequence[float], part: Part) -> float:
    return _mean([value for value in values if math.isfinite(value)][part.rows])


def in_words(interval: Interval, signed: bool = False) -> str:
    """Return a mean with its interval: ``1.2 [0.9, 1.5]``."""
    sign = "+" if signed else ""
    return f"{interval.mean:{sign}.3g} [{interval.low:{sign}.3g}, {interval.high:{sign}.3g}]"


def table(folder: Path) -> str:
    """Return the tables of the runs of ``folder``, whose name is that of a reproduction."""
    runs, reproduction = read(folder), REPRODUCTIONS[folder.name]
    variants = list(runs)
    baseline, seeds = variants[0], {variant: len(found) for variant, found in runs.items()}
    seconds = [rows[0]["seconds"] for found in runs.values() for rows in found.values()]
    lines = []
    for figure in reproduction.figures:
        lines += [f"**{figure.words[0].upper()}{figure.words[1:]}**, {figure.part.words}:", ""]
        lines += [f"| variant | seeds | mean | difference from `{baseline}` |", "|---|---|---|---|"]
        of_baseline = of_runs(runs[baseline], figure)
        for variant in variants:
            values = of_runs(runs[variant], figure)
            difference = "" if variant == baseline else in_words(paired_difference(values, of_baseline), signed=True)
            lines.append(f"| `{variant}` | {seeds[variant]} | {in_words(over_seeds(values))} | {difference} |")
        lines.append("")
    lines.append(f"{len(seconds)} runs took {sum(seconds) / 60:.0f} minutes together, one core each.")
    return "\n".join(lines) + "\n"


def page(names: Sequence[str]) -> str:
    """Return the rows of docs/reproductions.md."""
    lines = [
        "| what | effect, with 95 % interval | noise: the same settings twice | seeds | compute |",
        "|---|---|---|---|---|",
    ]
    for name in sorted(names):
        link = f"`examples/reproduce/{name}`: {REPRODUCTIONS[name].title}"
        if not (HERE / name / "runs.csv").exists():
            lines.append(f"| {link} | not run yet | | | |")
            continue
        runs, reproduction = read(HERE / name), REPRODUCTIONS[name]
        baseline = next(iter(runs))
        claim = next(figure for figure in reproduction.figures if figure.is_claim)
        values = of_runs(runs[baseline], claim)
        differences = {
            variant: paired_difference(of_runs(found, claim), values)
            for variant, found in runs.items()
            if variant != baseline
        }
        noise = next(differences.pop(variant) for variant in list(differences) if variant.endswith(AGAIN))
        minutes = sum(rows[0]["seconds"] for found in runs.values() for rows in found.values()) / 60
        effects = (f"`{variant}` {in_words(effect, signed=True)}" for variant, effect in differences.items())
        what = f"{claim.words}, less that of `{baseline}`: {'; '.join(effects)}"
        lines.append(
            f"| {link} | {what} | {in_words(noise, signed=True)} | {noise.count} | {minutes:.0f} core minutes |"
        )
    return "\n".join(lines) + "\n"


def replace_block(path: Path, block: str) -> None:
    """Replace what is between the marks of a page."""
    text = path.read_text(encoding="utf-8")
    assert BLOCK.search(text), f"{path} has no marks between which the measured part belongs"
    path.write_text(BLOCK.sub(lambda _: block, text), encoding="utf-8")


def draw(name: str) -> None:
    """Write curves.png of a reproduction."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    runs, figures = read(HERE / name), REPRODUCTIONS[name].figures
    shown, axes = pyplot.subplots(1, len(figures), figsize=(3.4 * len(figures), 3), squeeze=False)
    for axis, figure in zip(axes[0], figures, strict=True):
        for variant, found in runs.items():
            curves = np.array([[row[figure.column] for row in rows] for rows in found.values()])
            measured = np.isfinite(curves).any(axis=0)
            x = np.arange(1, curves.shape[1] + 1)[measured]
            mean, low, high = (values[measured] for values in band(curves))
            style = "--" if variant.endswith(AGAIN) else "-"
            (line,) = axis.plot(x, mean, style, linewidth=1.3, label=variant)
            axis.fill_between(x, low, high, alpha=0.15, color=line.get_color(), linewidth=0)
        words = figure.words.split(", ")[0]
        axis.set_title(words if len(words) < 40 else figure.column.replace("_", " "), size=9)
        axis.set_xlabel("iteration", size=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False, fontsize=7)
    shown.tight_layout()
    shown.savefig(HERE / name / "curves.png", dpi=80, metadata={"Software": None})
    pyplot.close(shown)


def main() -> None:
    """Show or keep sweeps, or only draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["show", "keep", "draw"])
    parser.add_argument("sweeps", type=Path, nargs="*", help="folders of sweeps, by the names of their reproductions")
    options = parser.parse_args()
    if options.what == "show":
        for folder in options.sweeps:
            keep(folder, folder)
            print(table(folder))
        return
    if options.what == "keep":
        for folder in options.sweeps:
            keep(folder, HERE / folder.name)
    for name in REPRODUCTIONS:
        block = NOT_RUN
        if (HERE / name / "runs.csv").exists():
            draw(name)
            block = f"{CAPTION}\n{table(HERE / name)}"
        replace_block(HERE / name / "README.md", block)
    replace_block(PAGE, page(list(REPRODUCTIONS)))


if __name__ == "__main__":
    main()
