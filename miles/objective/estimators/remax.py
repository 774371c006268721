"""ReMax: the reward minus the reward of the prompt's greedy response (arXiv 2310.10505)."""

from miles.objective.estimators.base import AdvantageFlags, Estimator, SampleRewards
from miles.objective.registry import Term


class Remax(Estimator[AdvantageFlags]):
    """``A_i = r(y_i) - r(y_greedy)``, y_greedy the response to the same prompt at temperature 0 (2310.10505).

    The greedy response does not depend on y_i, so the baseline adds no bias. It costs one more generation per prompt,
    which is scored and not trained on; ``rollout/greedy_reward`` is logged. Nothing is compared within the group: a
    group of one, the paper's setting, is as good as any. A sample with the same reward as the greedy response has
    exactly no advantage, and no gradient.
    """

    name = "remax"
    summary = "the reward minus the reward of the prompt's greedy response, which is generated too"
    reads = ("normalize_advantages",)
    greedy_baseline = True

    def formula(self, flags: AdvantageFlags) -> list[Term]:
        """Return the formula of A."""
        return [Term("A = reward - reward of the prompt's greedy response", __name__)]

    def sample_advantages(self, flags: AdvantageFlags, samples: SampleRewards) -> list[float]:
        """Subtract the baseline of each sample's prompt.

        Raises:
            ValueError: The greedy responses were not generated.
        """
        if len(samples.baselines) != len(samples.rewards):
            raise ValueError(
                "--advantage-estimator remax: a prompt group has no baseline_reward, the reward of its greedy "
                "response; samples that were saved (--load-debug-rollout-data) must come from a run with remax, and "
                "--rollout-function-path must make its groups with make_group"
            )
        return [reward - baseline for reward, baseline in zip(samples.rewards, samples.baselines, strict=True)]
