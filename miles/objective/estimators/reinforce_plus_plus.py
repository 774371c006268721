"""REINFORCE++: the discounted return of each token, whitened over the step (arXiv 2501.03262)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from miles.base.flags import Errors
from miles.objective.estimators.base import Estimator, TrajectoryTokens, require_whitening
from miles.objective.estimators.ppo import PpoFlags, generalized_advantages
from miles.objective.kl import reward_penalty
from miles.objective.registry import Term

if TYPE_CHECKING:
    import numpy as np

    from miles.objective.registry import StepShape


class ReinforcePlusPlus(Estimator[PpoFlags]):
    """The discounted return of ``r_t = [t = T] reward - kl_coef KL_t``."""

    name = "reinforce_plus_plus"
    summary = "the discounted return, whitened over the step"
    reads = ("normalize_advantages", "gamma", "kl_coef")
    by_token = True
    reward_at_last_token = True

    def check(self, flags: PpoFlags, shape: "StepShape", errors: Errors) -> None:
        """Require whitening."""
        require_whitening(self.name, flags, errors)

    def formula(self, flags: PpoFlags) -> list[Term]:
        """Return the formulas of A and the token rewards."""
        text = f"A_t = Σ_k {flags.gamma:g}^k r_(t+k), r_t = [t is last] reward{reward_penalty(flags)}"
        return [Term(text, __name__)]

    def token_advantages(self, flags: PpoFlags, trajectories: Sequence[TrajectoryTokens]) -> "list[np.ndarray]":
        """Compute GAE with values of 0 and lambda 1: the discounted return."""
        import numpy as np

        without_critic = [replace(each, values=np.zeros_like(each.rewards)) for each in trajectories]
        return generalized_advantages(without_critic, flags.gamma, 1.0)
