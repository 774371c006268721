"""VAPO: GAE whose lambda follows the length of the response, and another lambda for the critic (arXiv 2504.05118)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.base.flags import flag
from miles.objective.estimators.base import TrajectoryTokens
from miles.objective.estimators.ppo import Ppo, PpoFlags, generalized_advantages
from miles.objective.kl import reward_penalty
from miles.objective.registry import Term

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class VapoFlags(PpoFlags):
    """vapo: how lambda follows the length."""

    vapo_alpha: float = flag(
        0.05, "--advantage-estimator vapo estimates a response of l tokens with lambda 1 - 1 / (alpha l)", above=0
    )


class Vapo(Ppo[VapoFlags]):
    """GAE with ``lambda = 1 - 1 / (alpha l)`` for a response of l loss tokens (2504.05118, length-adaptive GAE).

    The sum of the weights ``lambda^k`` of a response is then about ``alpha l``, in proportion to its length; the paper
    uses alpha = 0.05. Its formula is below 0 for responses shorter than ``1 / alpha`` tokens, where lambda is 0 here.
    The critic learns from another lambda, 1, so that its targets do not rest on its own values (decoupled GAE, VC-PPO,
    2503.01491): ``--critic-lambd``, which ppo reads too. The paper's other parts are flags of their own:
    ``--loss-aggregation token_mean``, ``--eps-clip-high`` and ``--num-critic-only-steps``; its imitation loss on right
    answers is not here.

    A group of one is as good as any: nothing is compared within a group.
    """

    name = "vapo"
    summary = "ppo with a lambda that follows the length, and the critic's own lambda"
    reads = ("normalize_advantages", "gamma", "vapo_alpha", "critic_lambd", "value_clip", "kl_coef")
    own_flags = VapoFlags

    def formula(self, flags: VapoFlags) -> list[Term]:
        """Return the formulas of A, lambda, the token rewards and the critic's returns."""
        gamma = flags.gamma
        critic = self.critic_lambd(flags)
        return [
            Term(
                f"A_t = Σ_k ({gamma:g} λ)^k δ_(t+k), δ_t = r_t + {gamma:g} V_(t+1) - V_t with V = V_old, "
                f"λ = max(0, 1 - 1 / ({flags.vapo_alpha:g} l)), l = loss tokens of the trajectory",
                __name__,
            ),
            Term(f"G_t = V_t + Σ_k ({gamma:g} · {critic:g})^k δ_(t+k), the critic's return", __name__),
            Term(f"r_t = [t is last] reward{reward_penalty(flags)}", "miles.objective.token_advantages"),
        ]

    def critic_lambd(self, flags: VapoFlags) -> float | None:
        """Return ``--critic-lambd``, by default 1."""
        return 1.0 if flags.critic_lambd is None else float(flags.critic_lambd)

    def token_advantages(self, flags: VapoFlags, trajectories: Sequence[TrajectoryTokens]) -> "list[np.ndarray]":
        """Compute GAE, each trajectory with the lambda of its length."""
        lambdas = [length_adaptive_lambda(len(t.rewards), flags.vapo_alpha) for t in trajectories]
        return generalized_advantages(trajectories, flags.gamma, lambdas)


def length_adaptive_lambda(length: int, alpha: float) -> float:
    """Return ``1 - 1 / (alpha length)``, at least 0 (2504.05118).

    >>> length_adaptive_lambda(200, 0.05), length_adaptive_lambda(10, 0.05)
    (0.9, 0.0)
    """
    return max(0.0, 1.0 - 1.0 / (alpha * length)) if length else 0.0
