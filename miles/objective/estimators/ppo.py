"""PPO's advantages: generalized advantage estimation on the values of a critic (arXiv 1506.02438)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Optional, TypeVar

from miles.base.flags import flag
from miles.objective.estimators.base import AdvantageFlags, Estimator, TrajectoryTokens
from miles.objective.kl import reward_penalty
from miles.objective.registry import Needs, Term

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class PpoFlags(AdvantageFlags):
    """ppo: discount and lambda of generalized advantage estimation."""

    gamma: float = flag(1.0, "discount per response token; for ppo and reinforce_plus_plus", within="[0, 1]")
    lambd: float = flag(
        1.0, "lambda of GAE (ppo): 1 trusts the reward alone, 0 the critic's next value", within="[0, 1]"
    )
    critic_lambd: Optional[float] = flag(
        None,
        "lambda of the returns that the critic learns (ppo, vapo); default: --lambd for ppo, 1 for vapo",
        within="[0, 1]",
    )


P = TypeVar("P", bound=PpoFlags)


class Ppo(Estimator[P]):
    """GAE over the loss tokens t = 1..T of a trajectory, of ``r_t = [t = T] reward - kl_coef KL_t``.

    With ``--critic-lambd`` the critic's returns have another lambda (decoupled GAE, VC-PPO, 2503.01491).
    A group of one is as good as any: nothing is compared within a group.
    """

    name = "ppo"
    summary = "generalized advantages (GAE) on a critic that is trained alongside the policy"
    reads: tuple[str, ...] = ("normalize_advantages", "gamma", "lambd", "critic_lambd", "value_clip", "kl_coef")
    own_flags: ClassVar[type | None] = PpoFlags
    by_token = True
    reward_at_last_token = True

    def needs(self, flags: P) -> Needs:
        """Ask for a critic."""
        return super().needs(flags) | Needs(values=True)

    def formula(self, flags: P) -> list[Term]:
        """Return the formulas of A and the token rewards, and of the critic's returns if they are not A + V."""
        gamma, critic_lambd, module = flags.gamma, self.critic_lambd(flags), type(self).__module__
        decay, where = self.decay_formula(flags)
        text = f"A_t = Σ_k ({decay})^k δ_(t+k), δ_t = r_t + {gamma:g} V_(t+1) - V_t with V = V_old{where}"
        terms = [Term(text, module)]
        if critic_lambd is not None:
            text = f"G_t = V_t + Σ_k ({gamma:g} · {critic_lambd:g})^k δ_(t+k), the critic's return"
            terms.append(Term(text, module))
        penalty = reward_penalty(flags)
        return [*terms, Term(f"r_t = [t is last] reward{penalty}", "miles.objective.token_advantages")]

    def decay_formula(self, flags: P) -> tuple[str, str]:
        """Return the factor of each further step in the formula of A, and the definition of its symbols if any."""
        return f"{flags.gamma:g} · {flags.lambd:g}", ""

    def token_advantages(self, flags: P, trajectories: Sequence[TrajectoryTokens]) -> "list[np.ndarray]":
        """Compute GAE."""
        return generalized_advantages(trajectories, flags.gamma, self.lambdas(flags, trajectories))

    def lambdas(self, flags: P, trajectories: Sequence[TrajectoryTokens]) -> float | list[float]:
        """Return the lambda of all trajectories, or of each."""
        return flags.lambd

    def critic_lambd(self, flags: P) -> float | None:
        """Return the lambda of the critic's returns; None if these are ``A + V``."""
        return flags.critic_lambd

    def returns(
        self, flags: P, trajectories: Sequence[TrajectoryTokens], advantages: "Sequence[np.ndarray]"
    ) -> "list[np.ndarray]":
        """Compute ``A + V``, with the A of the critic's own lambda if it has one."""
        lambd = self.critic_lambd(flags)
        if lambd is not None:
            advantages = generalized_advantages(trajectories, flags.gamma, lambd)
        return super().returns(flags, trajectories, advantages)


def generalized_advantages(
    trajectories: Sequence[TrajectoryTokens], gamma: float, lambd: float | Sequence[float]
) -> "list[np.ndarray]":
    """Compute ``A_t = sum_k (gamma lambd)^k delta_(t+k)`` with ``delta_t = r_t + gamma V_(t+1) - V_t``; float64.

    GAE (arXiv 1506.02438 Eq. 16). One array per trajectory, [its tokens]; the value after the last token is 0, as
    the trajectory ends there. ``lambd`` is one number, or one per trajectory. With values of 0 and ``lambd`` 1 this is
    the discounted return.

    >>> import numpy as np
    >>> tokens = TrajectoryTokens(np.array([0.0, 1.0]), np.array([0.5, 0.25]), group=0, score_norms=np.zeros(0))
    >>> generalized_advantages([tokens], gamma=1.0, lambd=1.0)[0].tolist()
    [0.5, 0.75]
    """
    import numpy as np

    rewards, values = [t.rewards for t in trajectories], [t.values for t in trajectories]
    assert [len(r) for r in rewards] == [len(v) for v in values]
    longest = max((len(r) for r in rewards), default=0)

    def at_the_end(rows: "Sequence[np.ndarray]") -> "np.ndarray":
        matrix = np.zeros((len(rows), longest))
        for row, numbers in zip(matrix, rows, strict=True):
            row[longest - len(numbers) :] = numbers
        return matrix

    # Rows are padded at their start, so that one walk backwards begins at the last token of every trajectory.
    reward, value = at_the_end(rewards), at_the_end(values)
    advantages = np.zeros_like(reward)
    following = np.zeros((2, len(rewards)))  # advantage and value of the token after
    decay = gamma * np.asarray(lambd, np.float64)
    for t in reversed(range(longest)):
        delta = reward[:, t] + gamma * following[1] - value[:, t]
        advantages[:, t] = delta + decay * following[0]
        following[0], following[1] = advantages[:, t], value[:, t]
    return [row[longest - len(r) :] for row, r in zip(advantages, rewards, strict=True)]
