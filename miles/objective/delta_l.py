"""ΔL normalization (arXiv 2509.07558; VL Norm in its second version): a minimum-variance mean of unequal lengths.

The gradient of a whole response is an unbiased estimate whatever the response's length, and its variance grows with the
length. So a prompt's responses are averaged with the weights of least variance, ``M_r^-α / Σ_j M_j^-α`` with α = 1,
over the unnormalized sums ``S_r``. Between α = 1 and α = 0 long responses keep more weight. With α = 0 this is
``constant``, if groups are equally large and every response has loss tokens: one without any counts in the mean of
``constant``, and has no weight here.
"""

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles.objective.aggregation import Counts


def _powers(counts: "Counts") -> dict[int, float]:
    """Return ``M_r^-α`` of each trajectory; 0 without loss tokens, as there is nothing to weigh."""
    assert counts.alpha is not None, "the mode has a default"
    return {r: float(n) ** -counts.alpha if n else 0.0 for r, n in counts.of_trajectory.items()}


def _by_group(counts: "Counts", values: dict[int, float]) -> dict[int, float]:
    """Add up one value per trajectory over each group."""
    sums: defaultdict[int, float] = defaultdict(float)
    for trajectory, group in counts.group_of_trajectory().items():
        sums[group] += values[trajectory]
    return sums


def denominators(counts: "Counts") -> list[float]:
    """Return ``L P / (N x_r)`` of each sample, [S], with its trajectory's weight ``x_r = M_r^-α / Σ_j M_j^-α``."""
    powers = _powers(counts)
    sums = _by_group(counts, powers)
    scale = counts.checked_divisor() * counts.groups / counts.trajectories
    return [
        scale * sums[g] / powers[r] if powers[r] else scale
        for r, g in zip(counts.trajectory_ids, counts.group_indices, strict=True)
    ]


def mass(counts: "Counts") -> float:
    """Return the sum that a token loss of 1 everywhere gives: the weighted mean length of each prompt, over L."""
    powers = _powers(counts)
    norms = _by_group(counts, powers)
    tokens = _by_group(counts, {r: power * counts.of_trajectory[r] for r, power in powers.items()})
    means = sum(tokens[group] / norms[group] for group in norms if norms[group])
    return means / (counts.checked_divisor() * counts.groups)
