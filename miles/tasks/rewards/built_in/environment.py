"""``--rm-type environment``."""

from collections.abc import Sequence

from miles.tasks.rewards.base import NotAReward, Reward, Rewards
from miles.types.sample import Sample


class EnvironmentReward(Reward[None]):
    """The reward that the environment of ``--environment`` gave the trajectory, once for each of its samples."""

    name = "environment"
    summary = "what the environment of --environment gave"
    data = "what the environment needs"
    needs_label = False
    limit = "`--agent-timeout`"

    def score(self, samples: Sequence[Sample], flags: None) -> Rewards:
        """Read the reward that was recorded when the trajectory ended."""
        missing = NotAReward("has none: the trajectory was not made by --environment")
        return [missing if s.environment_reward is None else s.environment_reward for s in samples]
