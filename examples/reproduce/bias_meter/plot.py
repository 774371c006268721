"""Draw ``results.csv`` as two tables of colours: ``python plot.py RESULTS PICTURE``."""

from __future__ import annotations

import csv
import sys

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

PANELS = (
    ("bias", "bias: 0 is along the gradient of the mean reward", "{:.2f}", (0.0, 0.6)),
    ("noise", "noise: variance of a step over its squared mean", "{:.1f}", (0.0, 3.0)),
)


def main() -> None:
    """Write the picture of the on-policy rows."""
    with open(sys.argv[1], encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "on-policy"]
    estimators = list(dict.fromkeys(row["estimator"] for row in rows))
    modes = ["constant", "delta_l", "token_mean", "prompt_mean", "sample_mean"]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 8), sharey=True)
    for panel, (column, title, form, (low, high)) in zip(axes, PANELS, strict=True):
        table = np.zeros((len(estimators), len(modes)))
        for row in rows:
            table[estimators.index(row["estimator"]), modes.index(row["aggregation"])] = float(row[column])
        panel.imshow(table, cmap="Blues", vmin=low, vmax=high, aspect="auto")
        for (i, j), value in np.ndenumerate(table):
            shade = "white" if value > 0.6 * high else "black"
            panel.text(j, i, "0" if value == 0 else form.format(value), ha="center", va="center", color=shade, size=8)
        panel.set_xticks(range(len(modes)), modes, rotation=20)
        panel.set_yticks(range(len(estimators)), estimators)
        panel.set_title(title, size=10)
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=90, metadata={"Software": None})


if __name__ == "__main__":
    main()
