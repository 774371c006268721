"""Curves of several runs as one PNG: ``python scripts/curves.py RUN_DIR [RUN_DIR …] --out curve.png``."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.observe.run_files import METRICS, RunFiles
from miles.types.metrics import held_out_metrics

Row = Mapping[str, float]


@dataclass(frozen=True)
class Series:
    """One curve: ``ys[i]`` at step ``xs[i]``, NaN where nothing was measured."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]

    @property
    def finite(self) -> list[tuple[float, float]]:
        """The measured points."""
        return [(x, y) for x, y in zip(self.xs, self.ys, strict=True) if math.isfinite(y)]


def column(rows: Sequence[Row], name: str, label: str = "") -> Series:
    """Return one metric over the steps, NaN for steps without it."""
    return Series(label or name, [row["step"] for row in rows], [row.get(name, math.nan) for row in rows])


def evaluation_series(rows: Sequence[Row]) -> list[Series]:
    """Return held-out reward, one series per evaluation set."""
    metrics = held_out_metrics({name for row in rows for name in row})
    return [column(rows, metric, name) for name, metric in metrics.items()]


def _import_matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            "drawing a PNG needs matplotlib, which is not installed; install the extra with pip install 'miles[dev]', "
            "or open the run's report.html, which needs nothing"
        ) from error
    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    return plt


def read_run(run_dir: Path) -> list[dict[str, float]]:
    """Return the rows of a run. Raises ``ValueError`` when the folder holds none."""
    rows = RunFiles(run_dir).read_metrics()
    if not rows:
        raise ValueError(f"{run_dir}: no steps in {METRICS} there; give the --output-dir of a run")
    return rows


def mean_series(runs: Sequence[Series]) -> Series:
    """Return the mean over runs at the steps that all of them measured.

    >>> mean_series([Series("a", [0, 1], [0.0, 1.0]), Series("a", [0, 1, 2], [1.0, 1.0, 1.0])]).ys
    [0.5, 1.0]
    """
    points = [dict(run.finite) for run in runs]
    common = sorted(set.intersection(*(set(p) for p in points)))
    return Series("mean", common, [sum(p[x] for p in points) / len(points) for x in common])


def _panel(axis: Any, title: str, names: Sequence[str], curves: Sequence[Series], marker: str | None) -> None:
    """Every run thin; with several runs, their mean bold."""
    several = len(curves) > 1
    for name, curve in zip(names, curves, strict=True):
        xs, ys = zip(*curve.finite, strict=True) if curve.finite else ((), ())
        style = {"linewidth": 1.0, "alpha": 0.55} if several else {"linewidth": 1.8}
        axis.plot(xs, ys, marker=marker, markersize=3.5, label=name, **style)
    if several:
        mean = mean_series(curves)
        axis.plot(mean.xs, mean.ys, color="black", linewidth=2.0, label=f"mean of {len(curves)}")
    axis.set(title=title, xlabel="step", ylim=(min(0.0, axis.get_ylim()[0]), max(1.0, axis.get_ylim()[1])))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="lower right")


def _panels(names: Sequence[str], runs: Sequence[Sequence[Row]]) -> list[tuple[str, list[str], list[Series]]]:
    """Title, run names and curves of each panel: reward, then each evaluation set."""
    panels = [("reward", list(names), [column(rows, "rollout/reward") for rows in runs])]
    by_set: dict[str, tuple[list[str], list[Series]]] = {}
    for name, rows in zip(names, runs, strict=True):
        for series in evaluation_series(rows):
            owners, curves = by_set.setdefault(series.label, ([], []))
            owners.append(name)
            curves.append(series)
    return panels + [(f"held-out accuracy, {label}", *by_set[label]) for label in sorted(by_set)]


def draw(run_dirs: Sequence[Path], out: Path) -> None:
    """Write the PNG: one panel for reward and one for each evaluation set, one curve a run.

    Raises ``ValueError`` when a folder holds no run or matplotlib is missing.
    """
    runs = [read_run(run_dir) for run_dir in run_dirs]
    plt = _import_matplotlib()
    panels = _panels([run_dir.name for run_dir in run_dirs], runs)
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.6), dpi=130, squeeze=False)
    for axis, (title, names, curves) in zip(axes[0], panels, strict=True):
        _panel(axis, title, names, curves, None if title == "reward" else "o")
    figure.tight_layout()
    figure.savefig(out)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw reward and held-out accuracy against step, several seeds in one picture."""
    parser = argparse.ArgumentParser(prog="python scripts/curves.py", description=main.__doc__)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="the --output-dir of a run")
    parser.add_argument("--out", type=Path, default=Path("curve.png"), help="the PNG to write (default: curve.png)")
    parsed = parser.parse_args(arguments)
    try:
        draw(parsed.run_dirs, parsed.out)
    except ValueError as error:
        parser.error(str(error))
    print(parsed.out)


if __name__ == "__main__":
    main()
