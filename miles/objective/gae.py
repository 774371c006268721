"""Generalized advantage estimation, for many trajectories at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def generalized_advantages(
    rewards: Sequence[np.ndarray], values: Sequence[np.ndarray], gamma: float, lambd: float
) -> list[np.ndarray]:
    """``A_t = sum_k (gamma lambd)^k delta_(t+k)`` with ``delta_t = r_t + gamma V_(t+1) - V_t``; float64.

    GAE (arXiv 1506.02438 Eq. 16). One array a trajectory, all [its tokens]; the value after the last token is 0, as the
    trajectory ends there. With values of 0 and ``lambd`` 1 this is the discounted return.

    >>> generalized_advantages([np.array([0.0, 1.0])], [np.array([0.5, 0.25])], gamma=1.0, lambd=1.0)[0].tolist()
    [0.5, 0.75]
    """
    assert [len(r) for r in rewards] == [len(v) for v in values]
    longest = max((len(r) for r in rewards), default=0)
    # Trajectories stand at the end of their rows, so that one walk backwards meets all of them at their last token.
    reward, value = _at_the_end(rewards, longest), _at_the_end(values, longest)
    advantages = np.zeros_like(reward)
    following = np.zeros((2, len(rewards)))  # advantage and value of the token after
    for t in reversed(range(longest)):
        delta = reward[:, t] + gamma * following[1] - value[:, t]
        advantages[:, t] = delta + gamma * lambd * following[0]
        following[0], following[1] = advantages[:, t], value[:, t]
    return [row[longest - len(r) :] for row, r in zip(advantages, rewards, strict=True)]


def _at_the_end(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    found = np.zeros((len(rows), width))
    for row, values in zip(found, rows, strict=True):
        row[width - len(values) :] = values
    return found
