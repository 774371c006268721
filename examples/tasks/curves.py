"""Keep the metrics of a recipe's run alongside the recipe, and make its picture and the tables of the pages from them.

python examples/tasks/curves.py keep outputs/grpo …    write metrics.csv of examples/grpo, then draw
python examples/tasks/curves.py seeds outputs/seeds/grpo …    write seeds.csv from the runs of seeds.sh, then draw
python examples/tasks/curves.py draw                   make all pictures and tables from each metrics.csv

``--conditions "…"`` states how the runs that are kept were measured; it is written to conditions.txt alongside
metrics.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1]
OVERVIEW = EXAMPLES.parent / "docs" / "pictures" / "recipes.png"

ACCURACY, REWARD, SECONDS = "eval/heldout/accuracy", "rollout/reward", "time/step"
# The metrics that the tables show, in this order. A run without a metric has no row for it.
SHOWN = {
    REWARD: "reward",
    "train/entropy_loss": "entropy, nats per token",
    "train/pg_clipfrac": "clipped tokens, a fraction",
    "train/ppo_kl": "KL to the policy that sampled",
    "train/kl_loss": "KL to the model at the start",
    "train/opd_kl": "KL to the teacher",
    "train/value_loss": "loss of the critic",
    "rollout/response_length": "length, tokens",
    "rollout/truncated_fraction": "truncated, a fraction",
    "rollout/zero_std_groups": "groups of equal rewards, a fraction",
    "rollout/staleness": "age of the weights, iterations",
    "train/grad_norm": "norm of the gradient",
}
PANELS = (REWARD, "train/entropy_loss", "train/pg_clipfrac", "train/kl_loss", "rollout/response_length")
OWN_WEIGHTS = ("sft_then_rl", "vision")  # recipes whose runs make the weights that they start from
OWN_TASKS = {"agent_client": "guess"}  # of recipes that do not share theirs through recipe.sh
# Conditions of the runs whose examples have no conditions.txt.
CONDITIONS = """One run with seed 1, by the command itself, on two cores of an AMD EPYC that other programs used too.
Held-out accuracy is the mean reward of 64 prompts with 4 answers each at temperature 1, with a standard error of 0.01
to 0.06: smaller near 0 and 1, and larger the more the answers to one prompt are alike."""
# The 0.975 quantile of Student's t by degrees of freedom.
STUDENT = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
INTERVALS = """The interval is Student's prediction interval from the runs in the folder's `seeds.csv`: one more run
from the same start model, with any seed, ends within it in 95 % of the cases, if runs are normally distributed. It
states nothing of another start model. `bash examples/tasks/seeds.sh dapo` makes it again, with four seeds. With
`SEEDS=5` it makes the pages of GRPO and OPD, which have five. The pages of the agent client and of SFT, then RL say how
to repeat these recipes."""
NOT_REPEATED = "This recipe has not been repeated with other seeds, so its figure has no interval."
NOT_MEASURED = "No run of this recipe has been measured yet.\n"
BLOCK = re.compile(r"(?<=<!-- measured by examples/tasks/curves\.py -->\n).*?(?=<!-- end -->)", re.DOTALL)

Row = Mapping[str, float]


def recipes() -> list[Path]:
    """Return the folders of all recipes, by name."""
    return sorted(path.parent for path in EXAMPLES.glob("*/cluster.sh"))


def measured_examples() -> list[Path]:
    """Return the folders of examples that have metrics, by name."""
    return sorted(path.parent for path in EXAMPLES.glob("*/metrics.csv"))


def keep(run: Path, measured: str | None) -> Path:
    """Write the shown metrics of ``run`` and its conditions into the example of the same name; return its folder."""
    rows = [
        {name: value for name, value in json.loads(line).items() if value is not None}  # null: nothing to measure
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    columns = [name for name in (ACCURACY, *SHOWN, SECONDS) if any(name in row for row in rows)]
    folder = EXAMPLES / run.name
    with (folder / "metrics.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *columns])
        for row in rows:
            writer.writerow([row["step"], *(f"{row[name]:.4g}" if name in row else "" for name in columns)])
    if measured is not None:
        lines = textwrap.wrap(measured, 120, break_long_words=False, break_on_hyphens=False)
        (folder / "conditions.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def keep_seeds(sweep: Path) -> Path:
    """Write the first and the last accuracy of each run of a sweep into the example of the same name; return it."""
    folder = EXAMPLES / sweep.name
    runs = sorted(sweep.glob("run/seed-*/metrics.jsonl"), key=lambda file: int(file.parent.name.partition("-")[2]))
    with (folder / "seeds.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["seed", "before", "after"])
        for run in runs:
            accuracies = values([json.loads(line) for line in run.read_text(encoding="utf-8").splitlines()], ACCURACY)
            writer.writerow([run.parent.name.partition("-")[2], f"{accuracies[0]:.4g}", f"{accuracies[-1]:.4g}"])
    return folder


def accuracies_by_seed(folder: Path) -> dict[int, float]:
    """Return the last accuracy of each run in ``seeds.csv``, by seed; empty without that file."""
    if not (folder / "seeds.csv").exists():
        return {}
    with (folder / "seeds.csv").open(encoding="utf-8") as file:
        return {int(row["seed"]): float(row["after"]) for row in csv.DictReader(file)}


def interval(accuracies: Sequence[float]) -> tuple[float, float]:
    """Return the bounds within which one more run falls in 95 % of the cases, if runs are normally distributed.

    This is Student's prediction interval, ``mean +- t s sqrt(1 + 1/n)``, cut to accuracies.

    >>> [round(bound, 3) for bound in interval([0.5, 0.6, 0.7])]
    [0.103, 1.0]
    """
    mean = statistics.mean(accuracies)
    reach = STUDENT[len(accuracies) - 1] * statistics.stdev(accuracies) * math.sqrt(1 + 1 / len(accuracies))
    return max(0.0, mean - reach), min(1.0, mean + reach)


def seeds_text(folder: Path) -> str:
    """Return the accuracy at the end of the runs with several seeds, in words."""
    by_seed = accuracies_by_seed(folder)
    if not by_seed:
        return NOT_REPEATED
    results = list(by_seed.values())
    low, high = interval(results)
    each = ", ".join(f"{value:.3f}" for value in results)
    start = "each from its own weights" if folder.name in OWN_WEIGHTS else "from the same weights"
    text = (
        f"Held-out accuracy at the end with the seeds {min(by_seed)} to {max(by_seed)}, {start}: {each}; "
        f"mean {statistics.mean(results):.3f}. One more run falls between **{low:.2f} and {high:.2f}** in 95 % of the "
        "cases (Student's prediction interval)."
    )
    return "\n".join(textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))


def conditions(folder: Path) -> str:
    """Return how the run of an example was measured."""
    own = folder / "conditions.txt"
    return own.read_text(encoding="utf-8").rstrip("\n") if own.exists() else CONDITIONS


def read(folder: Path) -> list[Row]:
    """Return the rows of ``metrics.csv``; a row has the metrics that its step measured."""
    with (folder / "metrics.csv").open(encoding="utf-8") as file:
        return [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return the values of a metric in all steps that measured it."""
    return [row[name] for row in rows if name in row]


def quantile(numbers: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie, the nearest one.

    >>> quantile([4.0, 1.0, 2.0, 3.0, 5.0], 0.5)
    3.0
    """
    return sorted(numbers)[round(share * (len(numbers) - 1))]


def seconds(rows: Sequence[Row]) -> float:
    """Return the seconds of all steps, without start-up and evaluation."""
    return sum(values(rows, SECONDS))


def readme_block(folder: Path) -> str:
    """Return the picture and the tables of an example's README."""
    rows = read(folder)
    accuracies = [(row["step"], row[ACCURACY]) for row in rows if ACCURACY in row]
    lines = [
        conditions(folder),
        "",
        "![Curves of the run](curve.png)",
        "",
        "| step | " + " | ".join(f"{step:g}" for step, _ in accuracies) + " |",
        "|---" * (len(accuracies) + 1) + "|",
        "| held-out accuracy | " + " | ".join(f"{value:.3f}" for _, value in accuracies) + " |",
        "",
        seeds_text(folder),
        "",
        "| metric | first tenth of the run | last tenth | 5 % to 95 % of all steps |",
        "|---|---|---|---|",
    ]
    for name, words in SHOWN.items():
        column = values(rows, name)
        if column:
            part = max(1, len(column) // 10)
            first, last = sum(column[:part]) / part, sum(column[-part:]) / part
            low, high = quantile(column, 0.05), quantile(column, 0.95)
            lines.append(f"| {words} | {first:.3g} | {last:.3g} | {low:.3g} to {high:.3g} |")
    return "\n".join(lines) + f"\n\nThe steps took {seconds(rows):.0f} s.\n"


def title(folder: Path) -> str:
    """Return the name of a recipe: the title of its README up to a colon."""
    return (folder / "README.md").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").partition(":")[0]


def task(folder: Path) -> str:
    """Return the task of a recipe, which its run.sh names."""
    if folder.name in OWN_TASKS:
        return OWN_TASKS[folder.name]
    match = re.search(r"^recipe \w+ (\w+)", (folder / "run.sh").read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None, f"{folder / 'run.sh'} has no line: recipe NAME TASK"
    return match[1]


def page_block(folders: Sequence[Path]) -> str:
    """Return the table of recipes, for the docs."""
    lines = [
        "| recipe | command | task | held-out accuracy | interval of a run | steps | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for folder in folders:
        command = f"`bash examples/{folder.name}/run.sh`"
        if not (folder / "metrics.csv").exists():
            lines.append(f"| {title(folder)} | {command} | {task(folder)} | not measured yet | | | |")
            continue
        rows = read(folder)
        accuracies = values(rows, ACCURACY)
        moved = f"{accuracies[0]:.3f} → {accuracies[-1]:.3f}"
        repeats = list(accuracies_by_seed(folder).values())
        cell = "{:.2f} to {:.2f}".format(*interval(repeats)) if repeats else "not repeated"
        cells = [title(folder), command, task(folder), moved, cell, f"{rows[-1]['step']:g}", f"{seconds(rows):.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    own = [title(folder) for folder in folders if (folder / "conditions.txt").exists()]
    differ = f"\nMeasured otherwise, as their pages say: {', '.join(own)}." if own else ""
    return "\n".join([*lines, "", CONDITIONS + differ, "", INTERVALS]) + "\n"


def replace_block(page: Path, block: str) -> None:
    """Replace the text between the marks of a page."""
    text = page.read_text(encoding="utf-8")
    assert BLOCK.search(text), f"{page} has no marks between which the measured part belongs"
    page.write_text(BLOCK.sub(lambda _: block, text), encoding="utf-8")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=80, metadata={"Software": None})
    _pyplot().close(figure)


def draw(folder: Path) -> None:
    """Write ``curve.png`` of an example."""
    rows = read(folder)
    names = [name for name in PANELS if values(rows, name)]
    figure, axes = _pyplot().subplots(1, len(names), figsize=(2.6 * len(names), 2.4), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        measured = [row for row in rows if name in row]
        axis.plot([row["step"] for row in measured], [row[name] for row in measured], linewidth=1.2)
        axis.set_title(SHOWN[name], size=9)
        axis.tick_params(labelsize=8)
        axis.set_xlabel("step", size=8)
        axis.spines[["top", "right"]].set_visible(False)
        if name == REWARD:
            evaluated = [row for row in rows if ACCURACY in row]
            axis.plot([row["step"] for row in evaluated], [row[ACCURACY] for row in evaluated], "o-", markersize=4)
            axis.set_title("reward; dots: held-out accuracy", size=9)
    _save(figure, folder / "curve.png")


def draw_overview(folders: Sequence[Path]) -> None:
    """Write the picture of docs/recipes.md: held-out accuracy of all recipes, a panel per task."""
    tasks = sorted({task(folder) for folder in folders})
    figure, axes = _pyplot().subplots(1, len(tasks), figsize=(5 * len(tasks), 3.4), squeeze=False)
    for axis, name in zip(axes[0], tasks, strict=True):
        for folder in folders:
            if task(folder) == name:
                rows = read(folder)
                evaluated = [row for row in rows if ACCURACY in row]
                share = [100 * row["step"] / rows[-1]["step"] for row in evaluated]
                axis.plot(share, [row[ACCURACY] for row in evaluated], "o-", markersize=3, label=title(folder))
        axis.set(title=f"held-out accuracy, task {name}", xlabel="% of the run's steps", ylim=(0, 1))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=7)
    _save(figure, OVERVIEW)


def main() -> None:
    """Keep the metrics of runs, or only draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["keep", "seeds", "draw"])
    parser.add_argument("runs", type=Path, nargs="*", help="folders of runs, by the names of their examples")
    parser.add_argument("--conditions", help="how the runs were measured, in sentences")
    options = parser.parse_args()
    if options.what == "keep":
        changed = [keep(run, options.conditions) for run in options.runs]
    elif options.what == "seeds":
        changed = [keep_seeds(run) for run in options.runs]
    else:
        changed = measured_examples()
    for folder in changed:
        draw(folder)
        replace_block(folder / "README.md", readme_block(folder))
    draw_overview([folder for folder in recipes() if folder in measured_examples()])


if __name__ == "__main__":
    main()
