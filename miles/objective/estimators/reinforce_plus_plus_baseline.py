"""REINFORCE++ with a baseline: the reward less its group's mean, whitened over the step (arXiv 2501.03262)."""

from typing import TYPE_CHECKING

from miles.base.flags import Errors
from miles.objective.estimators.base import AdvantageFlags, Estimator, SampleRewards, less_group_mean, require_whitening
from miles.objective.kl import reward_penalty
from miles.objective.registry import Term

if TYPE_CHECKING:
    from miles.objective.registry import StepShape


class ReinforcePlusPlusBaseline(Estimator[AdvantageFlags]):
    """``reward - mean of its group - kl_coef KL_t`` on every token; nothing is discounted."""

    name = "reinforce_plus_plus_baseline"
    summary = "the reward less its group's mean, whitened over the step"
    reads = ("normalize_advantages", "kl_coef")
    instead = {"disable_rewards_normalization": "use --advantage-estimator reinforce_plus_plus"}
    by_token = True
    compares_groups = True  # a group of one is its own mean

    def check(self, flags: AdvantageFlags, shape: "StepShape", errors: Errors) -> None:
        """Require whitening."""
        require_whitening(self.name, flags, errors)

    def formula(self, flags: AdvantageFlags) -> list[Term]:
        """Return the formula of A."""
        return [Term(f"A_t = reward - mean of its prompt group{reward_penalty(flags)}", __name__)]

    def sample_advantages(self, flags: AdvantageFlags, samples: SampleRewards) -> list[float]:
        """Subtract the mean of the group."""
        return less_group_mean(samples, std=False)
