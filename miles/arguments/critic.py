"""The critic of ``--advantage-estimator ppo``; what its loss computes stands in the loss section."""

from dataclasses import dataclass
from typing import Optional

from miles.flags import flag


@dataclass(frozen=True)
class CriticArguments:
    """critic: the value model of --advantage-estimator ppo, and how it is trained."""

    critic_lr: Optional[float] = flag(None, "peak learning rate of the critic; default --lr")
    critic_lr_warmup_iters: int = flag(0, "optimizer steps of the critic's linear warm-up")
    num_critic_only_steps: int = flag(0, "rollouts at the start of the run in which only the critic learns")
