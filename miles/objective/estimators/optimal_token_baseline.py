"""The optimal token baseline: each token's own baseline, from its group's rewards and gradients (arXiv 2602.07078)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.base.flags import flag
from miles.objective.estimators.base import AdvantageFlags, Estimator, TrajectoryTokens
from miles.objective.kl import reward_penalty
from miles.objective.registry import Needs, Term

if TYPE_CHECKING:
    import numpy as np

    from miles.base.flags import Errors
    from miles.objective.registry import StepShape

_EPS = 1e-8


@dataclass(frozen=True)
class OptimalTokenBaselineFlags(AdvantageFlags):
    """loss: the end of the longest response of a group under the optimal token baseline."""

    otb_zero_tail: bool = flag(
        False,
        "give the tokens of a group's longest response after the end of all others the baseline 0 instead of their own "
        "return (verl's handle_zero_tail)",
    )


class OptimalTokenBaseline(Estimator[OptimalTokenBaselineFlags]):
    """``A_t = G_t - B_t``, a baseline for each position t of a group's responses (2602.07078; verl's of this name).

    ::

        G_t = sum of r_t' over t' >= t                     the return from token t on
        W_t = sum over j <= t of 1 - 2 p_j + sum_v p_j(v)^2
        B_t = sum over the group of G_t W_t / (sum over the group of W_t + 1e-8)

    The summand of W is the squared norm of the gradient of log p_j by the logits (one-hot less softmax), so W_t
    measures the gradient of the response up to t without a backward pass. Only responses that have a token t count at
    t. After the end of all others, B is the longest response's own return and A is 0, unless ``--otb-zero-tail``.
    Masked tokens do not count as tokens, as in verl's ``tir_optimal_token_baseline``. p is the trainer's before the
    first step; sum p(v)^2 costs one more forward pass. verl also scales W by squared importance weights if it corrects
    for the engine's probabilities; this estimator does not.

    A group of one is its own baseline, so its advantage is 0 (verl returns the reward).
    """

    name = "optimal_token_baseline"
    summary = "the return less a baseline of each token, weighted by the group's gradients"
    reads = ("normalize_advantages", "kl_coef", "otb_zero_tail")
    own_flags = OptimalTokenBaselineFlags
    by_token = True
    reward_at_last_token = True
    reads_score_norms = True
    compares_groups = True  # a group of one is its own baseline

    def needs(self, flags: OptimalTokenBaselineFlags) -> Needs:
        """Ask for the policy's log-probs and the sum of its squared probabilities."""
        return super().needs(flags) | Needs(old_log_probs=True, sum_squared_probs=True)

    def check(self, flags: OptimalTokenBaselineFlags, shape: "StepShape", errors: "Errors") -> None:
        """Check that a step has whole groups."""
        if shape.num_trajectories % max(shape.samples_per_prompt, 1):
            rule = f"--advantage-estimator {self.name} compares whole groups of {shape.samples_per_prompt} in a step"
            what_to_do = f"give a multiple of --n-samples-per-prompt {shape.samples_per_prompt}"
            errors.refuse("global_batch_size", shape.num_trajectories, rule, what_to_do)

    def formula(self, flags: OptimalTokenBaselineFlags) -> list[Term]:
        """Return the formulas of A, its baseline and the weights."""
        tail = ", 0 where one response is alone" if flags.otb_zero_tail else ""
        return [
            Term(f"A_t = G_t - B_t, G_t = Σ_(k>=t) r_k, r_k = [k is last] reward{reward_penalty(flags)}", __name__),
            Term(f"B_t = Σ_group G_t W_t / Σ_group W_t{tail}, W_t = Σ_(j<=t) (1 - 2 p_j + Σ_v p_j(v)²)", __name__),
        ]

    def token_advantages(
        self, flags: OptimalTokenBaselineFlags, trajectories: Sequence[TrajectoryTokens]
    ) -> "list[np.ndarray]":
        """Subtract the baseline of each position, group by group."""
        import numpy as np

        returns = [np.cumsum(each.rewards[::-1])[::-1] for each in trajectories]
        weights = [np.cumsum(each.score_norms) for each in trajectories]
        advantages = [np.zeros(0)] * len(returns)
        for group in dict.fromkeys(each.group for each in trajectories):
            members = [i for i, trajectory in enumerate(trajectories) if trajectory.group == group]
            lengths = sorted(len(returns[i]) for i in members)
            numerator = np.zeros(lengths[-1])
            denominator = np.full(lengths[-1], _EPS)
            for i in members:
                numerator[: len(returns[i])] += returns[i] * weights[i]
                denominator[: len(returns[i])] += weights[i]
            baseline = numerator / denominator
            if flags.otb_zero_tail and len(lengths) > 1:
                baseline[lengths[-2] :] = 0.0
            for i in members:
                advantages[i] = returns[i] - baseline[: len(returns[i])]
        return advantages
