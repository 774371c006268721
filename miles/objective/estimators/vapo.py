"""VAPO: GAE whose lambda follows the length of the response, and another lambda for the critic (arXiv 2504.05118)."""

from collections.abc import Sequence
from dataclasses import dataclass

from miles.base.flags import flag
from miles.objective.estimators.base import TrajectoryTokens
from miles.objective.estimators.ppo import Ppo, PpoFlags


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

    def decay_formula(self, flags: VapoFlags) -> tuple[str, str]:
        """Return the factor with lambda as a symbol, and the definition of lambda."""
        definition = f", λ = max(0, 1 - 1 / ({flags.vapo_alpha:g} l)), l = loss tokens of the trajectory"
        return f"{flags.gamma:g} λ", definition

    def critic_lambd(self, flags: VapoFlags) -> float | None:
        """Return ``--critic-lambd``, by default 1."""
        return 1.0 if flags.critic_lambd is None else float(flags.critic_lambd)

    def lambdas(self, flags: VapoFlags, trajectories: Sequence[TrajectoryTokens]) -> list[float]:
        """Return the lambda of each trajectory's length."""
        return [length_adaptive_lambda(len(each.rewards), flags.vapo_alpha) for each in trajectories]


def length_adaptive_lambda(length: int, alpha: float) -> float:
    """Return ``1 - 1 / (alpha length)``, at least 0 (2504.05118).

    >>> length_adaptive_lambda(200, 0.05), length_adaptive_lambda(10, 0.05)
    (0.9, 0.0)
    """
    return max(0.0, 1.0 - 1.0 / (alpha * length)) if length else 0.0
