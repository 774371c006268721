"""Configure the critic of ``--advantage-estimator ppo``; the flags of its loss are in the loss section."""

from dataclasses import dataclass, replace
from typing import Optional

from miles.base.flags import Errors, flag
from miles.config.optimizer import OptimizerArguments, check_warmup


@dataclass(frozen=True)
class CriticArguments:
    """critic: the value model of --advantage-estimator ppo, and how it is trained."""

    critic_lr: Optional[float] = flag(
        None, "peak learning rate of the critic; default: --lr", above=0, needs="a critic"
    )
    critic_lr_warmup_iters: int = flag(
        0, "optimizer steps of the critic's linear warm-up", at_least=0, needs="a critic"
    )
    num_critic_only_steps: int = flag(
        0,
        "iterations at the start of the run where only the critic learns",
        at_least=0,
        needs="a critic, a policy that learns",
    )


def critic_optimizer(critic: CriticArguments, optimizer: OptimizerArguments) -> OptimizerArguments:
    """Return the policy's optimizer with the critic's learning rate and warm-up."""
    rate = optimizer.lr if critic.critic_lr is None else critic.critic_lr
    return replace(optimizer, lr=rate, lr_warmup_iters=critic.critic_lr_warmup_iters, lr_warmup_fraction=None)


def check_critic(
    critic: CriticArguments,
    optimizer: OptimizerArguments,
    trains_policy: bool,
    num_iterations: int | None,
    errors: Errors,
) -> None:
    """Check the critic's schedule, and that the policy learns if it is meant to.

    Args:
        critic: The section.
        optimizer: The policy's optimizer, whose other settings the critic's optimizer shares.
        trains_policy: Whether the policy learns too; under ``--loss-type value_loss`` only the critic does.
        num_iterations: Iterations of the run; None if ``--num-epoch`` determines them.
        errors: Collects the errors.
    """
    check_warmup("critic_lr_warmup_iters", critic_optimizer(critic, optimizer), errors)
    rate = critic_optimizer(critic, optimizer).lr
    if errors.none_about("lr", "min_lr", "critic_lr") and rate < optimizer.min_lr:
        rule = f"is below --min-lr {optimizer.min_lr:g}, at which its decay ends"
        errors.refuse("critic_lr", f"{rate:g}", rule, "give at least --min-lr")
    if not trains_policy:
        return
    alone = critic.num_critic_only_steps
    if num_iterations is not None and errors.none_about("num_rollout") and alone >= num_iterations:
        rule = f"leaves none of the --num-rollout {num_iterations} iterations to the policy"
        what_to_do = "give fewer, or train only the critic with --loss-type value_loss"
        errors.refuse("num_critic_only_steps", alone, rule, what_to_do)
