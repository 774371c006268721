"""Draws ``docs/token_weights.svg``: the weight of one token by the length of its response, in each mode.

``python docs/pictures/token_weights.py``; the weights come from ``miles.objective.aggregation``, not drawn by hand.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

from miles.objective.aggregation import MODES, Aggregation, step_denominators

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402  the backend is chosen first

OUT = Path(__file__).resolve().parents[1] / "token_weights.svg"
PROMPTS, ROLLOUTS, LONGEST = 16, 8, 2048
STYLES = {  # Okabe and Ito's colours, which differ for colour-blind readers too
    "sample_mean": ("#0072B2", "o"),
    "prompt_mean": ("#D55E00", "s"),
    "token_mean": ("#009E73", "^"),
    "constant": ("#CC79A7", "v"),
    "delta_l": ("#E69F00", "D"),
}


def response_lengths() -> np.ndarray:
    """[P, rollouts a prompt]: each prompt has its typical length, and its rollouts scatter around it."""
    random = np.random.default_rng(7)
    typical = np.geomspace(40, 900, PROMPTS)[:, None]
    return np.clip(typical * random.lognormal(0.0, 0.45, (PROMPTS, ROLLOUTS)), 8, LONGEST).astype(int)


def token_weights(mode: Aggregation, lengths: np.ndarray) -> np.ndarray:
    """The weight of one token of each sample in pg_loss, times T: 1 is its weight if all weighed the same."""
    counts = [int(n) for n in lengths.flatten()]
    denominators = step_denominators(
        mode,
        token_counts=counts,
        trajectory_ids=list(range(len(counts))),
        group_indices=[i // lengths.shape[1] for i in range(len(counts))],
        divisor=float(LONGEST),
        alpha=MODES[mode].default_alpha,
    )
    weights = 1 / (denominators.num_trajectories * np.asarray(denominators.sample_denoms))
    return denominators.num_loss_tokens * weights


def draw() -> None:
    plt.rcParams |= {"svg.hashsalt": OUT.stem, "svg.fonttype": "none", "font.size": 11}
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    lengths = response_lengths()
    for mode in MODES:
        colour, marker = STYLES[mode]
        axes.scatter(lengths, token_weights(mode, lengths), s=14, color=colour, marker=marker, alpha=0.75, label=mode)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="response length, tokens",
        ylabel="weight of one token (token_mean = 1)",
        title=f"{PROMPTS} prompts, {ROLLOUTS} rollouts each, divisor {LONGEST}",
    )
    axes.set_xticks([10, 30, 100, 300, 1000], ["10", "30", "100", "300", "1000"])
    axes.set_yticks([0.1, 0.3, 1, 3, 10, 30], ["0.1", "0.3", "1", "3", "10", "30"])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(OUT, metadata={"Date": None})  # the same bytes each time


if __name__ == "__main__":
    draw()
