"""Call the user's functions (hooks.py) in the place of a built-in part of the objective, and check what they return.

Functions see whole samples. Detached ones are called on gathered columns, and their result is sliced. Losses are
evaluated whole on every rank of the context group and counted once (sequences.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from miles.objective.estimators.base import Estimator, SampleRewards
from miles.objective.hooks import (
    ADVANTAGES,
    IMPORTANCE,
    POLICY_LOSS,
    REDUCER,
    AdvantageSamples,
    AdvantageTrajectory,
    ImportanceInputs,
    PolicyLossInputs,
    ReducerInputs,
)
from miles.objective.policy_losses.base import PolicyLoss, PolicyTokens, TokenLosses
from miles.objective.registry import Needs, Term
from miles.objective.sequences import count_once, gather_whole, whole_responses

if TYPE_CHECKING:
    import numpy as np
    import torch

    from miles.base.flags import Errors
    from miles.objective.aggregation import Reducer
    from miles.objective.settings import LossArguments, StepShape
    from miles.objective.token_weights import Ratios
    from miles.types.train_batch import MicroBatch


class CustomAdvantages(Estimator):
    """An estimator with one phase computed by the user's function. Everything else stays the chosen estimator's."""

    summary = "computed by your function"

    def __init__(self, path: str, estimator: Estimator) -> None:
        self.path = path
        self.estimator = estimator
        self.name = estimator.name
        self.reads = estimator.reads
        self.instead = estimator.instead
        self.default_policy_loss = estimator.default_policy_loss
        self.by_token = estimator.by_token
        self.reward_at_last_token = estimator.reward_at_last_token
        self.greedy_baseline = estimator.greedy_baseline
        self.reads_reward_parts = estimator.reads_reward_parts
        self.reads_score_norms = estimator.reads_score_norms
        self.accepts_one = estimator.accepts_one

    def needs(self, flags: Any) -> Needs:
        """Return what the chosen estimator needs."""
        return self.estimator.needs(flags)

    def token_needs(self, flags: Any) -> Needs:
        """Return the same, less what a function of phase 2 is not shown."""
        needs = self.needs(flags)
        if needs.sum_squared_probs and ADVANTAGES.phase(self.path) == 2:
            return replace(needs, sum_squared_probs=False)
        return needs

    def check(self, flags: Any, shape: StepShape, errors: Errors) -> None:
        """Check what the chosen estimator checks."""
        self.estimator.check(flags, shape, errors)

    def formula(self, flags: Any) -> list[Term]:
        """Return the call of the function."""
        return [Term(f"A = {self.path}(...) in the place of --advantage-estimator {self.name}", __name__, self.path)]

    def smallest_group(self, flags: Any) -> int:
        """Return the chosen estimator's if it compares in phase 2, which may follow; else the function may do without.

        Flags are checked before the function is imported, so its phase is not known here.
        """
        return self.estimator.smallest_group(flags) if self.reads_score_norms else 1

    def estimates_by_token(self, flags: Any) -> bool:
        """Return whether phase 2 runs."""
        return ADVANTAGES.phase(self.path) == 2 or self.estimator.estimates_by_token(flags)

    def sample_advantages(self, flags: Any, samples: SampleRewards) -> list[float]:
        """Call a function of phase 1, and check what it returns."""
        if ADVANTAGES.phase(self.path) == 2:
            return self.estimator.sample_advantages(flags, samples)
        function = ADVANTAGES.load(self.path)
        given = AdvantageSamples(samples.rewards, samples.group_indices, samples.trajectory_ids, flags)
        found = [float(advantage) for advantage in function(given)]
        if len(found) != len(samples.rewards) or any(advantage - advantage != 0.0 for advantage in found):
            raise ValueError(
                f"{ADVANTAGES.flag} {self.path}: returned {len(found)} numbers for {len(samples.rewards)} samples, or "
                "one that is not finite; return one finite number per sample"
            )
        return found

    def token_advantages(
        self, flags: Any, rewards: Sequence[np.ndarray], values: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Call a function of phase 2, and check what it returns."""
        if ADVANTAGES.phase(self.path) == 1:
            return self.estimator.token_advantages(flags, rewards, values)
        import numpy as np

        function = ADVANTAGES.load(self.path)
        given = [AdvantageTrajectory(r, v, flags) for r, v in zip(rewards, values, strict=True)]
        found = [np.asarray(advantages, np.float64) for advantages in function(given)]
        shapes, wanted = [a.shape for a in found], [r.shape for r in rewards]
        if shapes != wanted or not all(np.isfinite(a).all() for a in found):
            raise ValueError(
                f"{ADVANTAGES.flag} {self.path}: returned arrays of shapes {shapes}, wanted are {wanted}, all finite; "
                "return one finite number per loss token"
            )
        return found

    def group_token_advantages(
        self,
        flags: Any,
        rewards: Sequence[np.ndarray],
        groups: Sequence[int],
        score_norms: Sequence[np.ndarray],
    ) -> list[np.ndarray]:
        """Call a function of phase 2; after one of phase 1 compute the chosen estimator's."""
        if ADVANTAGES.phase(self.path) == 1:
            return self.estimator.group_token_advantages(flags, rewards, groups, score_norms)
        return self.token_advantages(flags, rewards, [reward[:0] for reward in rewards])

    def returns(
        self,
        flags: Any,
        rewards: Sequence[np.ndarray],
        values: Sequence[np.ndarray],
        advantages: Sequence[np.ndarray],
    ) -> list[np.ndarray]:
        """Return the chosen estimator's."""
        return self.estimator.returns(flags, rewards, values, advantages)


class CustomPolicyLoss(PolicyLoss):
    """The policy loss of ``--custom-policy-loss-function-path``."""

    name = "custom"
    summary = "computed by your function"
    sees_whole_samples: ClassVar[bool] = True

    def __init__(self, path: str) -> None:
        self.path = path

    def formula(self, flags: Any) -> list[Term]:
        """Return the call of the function."""
        return [Term(f"{self.path}(log p, log p_old, A, ...)", __name__, self.path)]

    def zero_advantage_has_gradient(self, flags: Any) -> bool:
        """Return what the function says; true until it says no."""
        return POLICY_LOSS.zero_advantage_has_gradient(self.path)

    def token_losses(self, flags: Any, tokens: PolicyTokens) -> TokenLosses:
        """Call the function. A micro-batch without samples is not shown to it."""
        function = POLICY_LOSS.load(self.path)
        if not tokens.micro.response_lengths:
            return TokenLosses(tokens.log_probs, None)
        given = PolicyLossInputs(**token_columns(tokens.micro, tokens.log_probs), settings=flags)
        losses = function(given)
        POLICY_LOSS.check_tensor(self.path, losses, tuple(tokens.log_probs.shape))
        # What is masked may hold anything, but its gradient must not be NaN.
        return TokenLosses(losses.float().masked_fill(tokens.micro.loss_mask == 0, 0.0), None)


def custom_importance_weights(path: str, loss: LossArguments, ratios: Ratios) -> torch.Tensor:
    """Gather, call, and slice: the weights of this rank's tokens, fp32 [R], without a graph."""
    function, micro = IMPORTANCE.load(path), ratios.micro
    whole = gather_whole(micro)
    old_log_probs = whole_responses(ratios.trainer_log_probs.float().masked_fill(micro.loss_mask == 0, 0.0), micro)
    if not micro.response_lengths:
        return old_log_probs
    inputs = ImportanceInputs(
        old_log_probs=old_log_probs,
        rollout_log_probs=whole.rollout_log_probs,
        advantages=whole.advantages,
        loss_mask=whole.loss_mask,
        sample_index=whole.sample_index,
        response_lengths=micro.response_lengths,
        settings=loss,
    )
    weights: torch.Tensor = function(inputs)
    IMPORTANCE.check_tensor(path, weights, tuple(old_log_probs.shape))
    return weights.detach().float()[micro.response_index]


def get_custom_pg_loss_reducer(path: str, loss: LossArguments, micro: MicroBatch) -> Reducer:
    """Return the reducer that the function at ``path`` makes for ``micro``; its signature says which form it has.

    For an empty micro-batch the loss is 0, and the function is not called.

    Raises:
        ValueError: If the function cannot be imported or has neither form, or if its reducer returns anything but a
            scalar tensor.
    """
    function = REDUCER.load(path)
    if not micro.response_lengths:
        return lambda losses: losses.sum()
    whole_mask = whole_responses(micro.loss_mask, micro)
    loss_masks: tuple[torch.Tensor, ...] = whole_mask.split(list(micro.response_lengths))
    if REDUCER.num_arguments(function, path) == 1:
        reducer = function(
            ReducerInputs(
                total_lengths=micro.total_lengths,
                response_lengths=micro.response_lengths,
                loss_mask=whole_mask,
                loss_masks=loss_masks,
                sample_denoms=micro.sample_denoms,
                num_trajectories=micro.num_trajectories,
                num_loss_tokens=micro.num_loss_tokens,
                context_parallel_size=micro.context.size,
                settings=loss,
            )
        )
        return _checked(reducer, path, micro, divisor=1)
    per_token = loss.calculate_per_token_loss
    reducer = function(list(micro.total_lengths), list(micro.response_lengths), list(loss_masks), per_token)
    return _checked(
        reducer, path, micro, divisor=max(micro.num_loss_tokens, 1) if per_token else micro.num_trajectories
    )


def token_columns(micro: MicroBatch, log_probs: torch.Tensor) -> dict[str, Any]:
    """Return the fields that the inputs of token losses and of a whole loss share; masked log-probs are 0."""
    held = micro.loss_mask == 0

    def column(values: torch.Tensor) -> torch.Tensor:
        return values.masked_fill(held, 0.0)

    return dict(
        log_probs=log_probs,
        old_log_probs=log_probs.detach() if micro.old_log_probs is None else column(micro.old_log_probs),
        rollout_log_probs=column(micro.rollout_log_probs),
        ref_log_probs=None if micro.ref_log_probs is None else column(micro.ref_log_probs),
        advantages=column(micro.advantages),
        loss_mask=micro.loss_mask,
        sample_index=micro.sample_index,
        response_lengths=micro.response_lengths,
        total_lengths=micro.total_lengths,
        num_trajectories=micro.num_trajectories,
        num_loss_tokens=micro.num_loss_tokens,
    )


def _checked(reducer: Any, path: str, micro: MicroBatch, divisor: int) -> Reducer:
    """``reducer`` over whole responses: ranks that share the samples each give it all, and one of them counts."""
    if not callable(reducer):
        raise ValueError(
            f"{REDUCER.flag} {path}: returned {type(reducer).__name__}; return a function of the per-token losses"
        )

    def reduce(values: torch.Tensor) -> torch.Tensor:
        result = reducer(whole_responses(values.float(), micro))
        REDUCER.check_tensor(path, result, (), ", its reducer")
        return count_once(result.float() / divisor, micro)

    return reduce
