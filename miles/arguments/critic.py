"""Configure the critic of ``--advantage-estimator ppo``; the flags of its loss are in the loss section."""

from dataclasses import dataclass
from typing import Optional

from miles.flags import flag


@dataclass(frozen=True)
class CriticArguments:
    """critic: the value model of --advantage-estimator ppo, and how it is trained."""

    critic_lr: Optional[float] = flag(None, "peak learning rate of the critic; default: --lr")
    critic_lr_warmup_iters: int = flag(0, "optimizer steps of the critic's linear warm-up")
    num_critic_only_steps: int = flag(0, "iterations at the start of the run in which only the critic learns")


def explain_critic(has_critic: bool) -> list[str]:
    """Return the line about the critic, if there is one."""
    return ["each trainer rank holds the policy and the critic"] if has_critic else []
