"""pass@k: the chance that at least one of k responses to a prompt passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import comb

from miles.metrics import Metric

PASS_REWARD = 1.0  # a sample passes with this reward or more


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate 1 - C(n-c, k) / C(n, k) from ``c`` passes in ``n`` responses (Chen et al., 2107.03374).

    >>> pass_at_k(n=4, c=1, k=2)
    0.5
    """
    assert 0 <= c <= n and 1 <= k <= n, f"pass@{k} of {c} passes in {n} responses is not defined"
    return 1.0 - comb(n - c, k) / comb(n, k)


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, … up to and including ``n``."""
    return [1 << i for i in range(n.bit_length())]


def pass_at_k_metrics(rewards_by_prompt: Iterable[Sequence[float]]) -> dict[str, Metric]:
    """``pass@1``, ``pass@2``, ``pass@4``, …: means over the prompts that have at least k responses."""
    metrics: dict[str, Metric] = {}
    for rewards in rewards_by_prompt:
        passes = sum(reward >= PASS_REWARD for reward in rewards)
        for k in powers_of_two(len(rewards)):
            name = f"pass@{k}"
            estimate = Metric(pass_at_k(len(rewards), passes, k), 1.0)
            metrics[name] = metrics[name] + estimate if name in metrics else estimate
    return metrics
