"""Call the user's functions (hooks.py) in the place of a built-in part of the objective, and check what they return.

Functions see whole samples. Detached ones are called on gathered columns, and their result is sliced. Losses are
evaluated whole on every rank of the context group and counted once (sequences.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from miles.import_path import load_function
from miles.objective.estimators.base import Estimator, SampleRewards
from miles.objective.hooks import (
    ADVANTAGE_FLAG,
    LOSS_FLAG,
    POLICY_LOSS_FLAG,
    REDUCER_FLAG,
    TIS_FLAG,
    AdvantageSamples,
    AdvantageTrajectory,
    ImportanceInputs,
    LossInputs,
    PolicyLossInputs,
    ReducerInputs,
    advantage_phase,
    load_hook,
    num_reducer_arguments,
    zero_advantage_has_gradient,
)
from miles.objective.output import LossOutput
from miles.objective.policy_losses.base import PolicyLoss, PolicyTokens, TokenLosses
from miles.objective.registry import Needs, Term
from miles.objective.sequences import count_once, gather_whole, whole_responses

if TYPE_CHECKING:
    import numpy as np
    import torch

    from miles.flags import Errors
    from miles.objective.aggregation import Reducer
    from miles.objective.corrections import Ratios
    from miles.objective.settings import LossArguments, StepShape
    from miles.train_batch import MicroBatch


class CustomAdvantages(Estimator):
    """An estimator with one phase computed by the user's function. Everything else stays the chosen estimator's."""

    name = "custom"
    summary = "computed by your function"

    def __init__(self, path: str, estimator: Estimator) -> None:
        self.path = path
        self.estimator = estimator
        self.name = estimator.name  # type: ignore[misc]
        self.reads = estimator.reads  # type: ignore[misc]
        self.instead = estimator.instead  # type: ignore[misc]
        self.default_policy_loss = estimator.default_policy_loss  # type: ignore[misc]
        self.reward_at_last_token = estimator.reward_at_last_token  # type: ignore[misc]

    def needs(self, flags: Any) -> Needs:
        """Return what the chosen estimator needs."""
        return self.estimator.needs(flags)

    def check(self, flags: Any, shape: StepShape, errors: Errors) -> None:
        """Check what the chosen estimator checks."""
        self.estimator.check(flags, shape, errors)

    def formula(self, flags: Any) -> list[Term]:
        """Return the call of the function."""
        return [Term(f"A = {self.path}(...) in the place of --advantage-estimator {self.name}", __name__)]

    def estimates_by_token(self, flags: Any) -> bool:
        """Return whether phase 2 runs."""
        return advantage_phase(self.path) == 2 or self.estimator.estimates_by_token(flags)

    def sample_advantages(self, flags: Any, samples: SampleRewards) -> list[float]:
        """Call a function of phase 1, and check what it returns."""
        if advantage_phase(self.path) == 2:
            return self.estimator.sample_advantages(flags, samples)
        function = load_function(self.path, ADVANTAGE_FLAG)
        given = AdvantageSamples(samples.rewards, samples.group_indices, samples.trajectory_ids, flags)
        found = [float(advantage) for advantage in function(given)]
        if len(found) != len(samples.rewards) or any(advantage - advantage != 0.0 for advantage in found):
            raise ValueError(
                f"{ADVANTAGE_FLAG} {self.path}: returned {len(found)} numbers for {len(samples.rewards)} samples, or "
                "one that is not finite; return one finite number per sample"
            )
        return found

    def token_advantages(
        self, flags: Any, rewards: Sequence[np.ndarray], values: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Call a function of phase 2, and check what it returns."""
        if advantage_phase(self.path) == 1:
            return self.estimator.token_advantages(flags, rewards, values)
        import numpy as np

        function = load_function(self.path, ADVANTAGE_FLAG)
        given = [AdvantageTrajectory(r, v, flags) for r, v in zip(rewards, values, strict=True)]
        found = [np.asarray(advantages, np.float64) for advantages in function(given)]
        shapes, wanted = [a.shape for a in found], [r.shape for r in rewards]
        if shapes != wanted or not all(np.isfinite(a).all() for a in found):
            raise ValueError(
                f"{ADVANTAGE_FLAG} {self.path}: returned arrays of shapes {shapes}, wanted are {wanted}, all finite; "
                "return one finite number per loss token"
            )
        return found


class CustomPolicyLoss(PolicyLoss):
    """The policy loss of ``--custom-policy-loss-function-path``."""

    name = "custom"
    summary = "computed by your function"
    sees_whole_samples: ClassVar[bool] = True

    def __init__(self, path: str) -> None:
        self.path = path

    def formula(self, flags: Any) -> list[Term]:
        """Return the call of the function."""
        return [Term(f"{self.path}(log p, log p_old, A, ...)", __name__)]

    def zero_advantage_has_gradient(self, flags: Any) -> bool:
        """Return what the function says; true until it says no."""
        return zero_advantage_has_gradient(self.path, POLICY_LOSS_FLAG)

    def token_losses(self, flags: Any, tokens: PolicyTokens) -> TokenLosses:
        """Call the function. A micro-batch without samples is not shown to it."""
        function = load_hook(self.path, POLICY_LOSS_FLAG, "PolicyLossInputs")
        if not tokens.micro.response_lengths:
            return TokenLosses(tokens.log_probs, None)
        given = PolicyLossInputs(**_columns(tokens.micro, tokens.log_probs), settings=flags)
        losses = function(given)
        _check_tensor(losses, tuple(tokens.log_probs.shape), f"{POLICY_LOSS_FLAG} {self.path}")
        # What is masked may hold anything, but its gradient must not be NaN.
        return TokenLosses(losses.float().masked_fill(tokens.micro.loss_mask == 0, 0.0), None)


def custom_loss_function(
    loss: LossArguments,
    micro: MicroBatch,
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    canary: torch.Tensor | None,
) -> LossOutput:
    """Compute ``--loss-type custom_loss`` on whole samples, counted once in each context group.

    Args:
        loss: The flags.
        micro: The micro-batch.
        log_probs: Log-probs of the current policy, [R], with a graph.
        entropy: Its entropy, [R], with a graph.
        canary: A scalar 0 that some backends need in the graph; its gradient is 0 here.
    """
    from miles.objective.aggregation import get_pg_loss_reducer, get_sum_of_sample_mean, is_per_token

    path = loss.custom_loss_function_path
    assert path is not None, "validate() demands --custom-loss-function-path"
    function = load_hook(path, LOSS_FLAG, "LossInputs")
    names = tuple(getattr(function, "metrics", ()))
    whole, mask = gather_whole(micro), micro.loss_mask == 0
    log_probs, entropy = (
        whole_responses(values.float().masked_fill(mask, 0.0), micro) for values in (log_probs, entropy)
    )
    total, metrics = log_probs.sum() + entropy.sum(), dict.fromkeys(names, log_probs.new_zeros(()))
    if micro.response_lengths:
        inputs = LossInputs(
            **_columns(whole, log_probs),
            settings=loss,
            entropy=entropy,
            reduce=get_pg_loss_reducer(loss, whole),
            mean=get_sum_of_sample_mean(whole, is_per_token(loss)),
        )
        found = function(inputs)
        total, metrics = found if isinstance(found, tuple) else (found, {})
        _check_tensor(total, (), f"{LOSS_FLAG} {path}")
        _check_metrics(metrics, names, path)
    if canary is not None:
        total = total + 0.0 * canary
    metrics = {**metrics, "loss": total}
    return LossOutput(
        count_once(total, micro), {name: count_once(value.detach(), micro) for name, value in metrics.items()}
    )


def custom_importance_weights(path: str, loss: LossArguments, ratios: Ratios) -> torch.Tensor:
    """Gather, call, and slice: the weights of this rank's tokens, fp32 [R], without a graph."""
    function, micro = load_hook(path, TIS_FLAG, "ImportanceInputs"), ratios.micro
    whole = gather_whole(micro)
    old_log_probs = whole_responses(ratios.old_log_probs.float().masked_fill(micro.loss_mask == 0, 0.0), micro)
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
    _check_tensor(weights, tuple(old_log_probs.shape), f"{TIS_FLAG} {path}")
    return weights.detach().float()[micro.response_index]


def get_custom_pg_loss_reducer(path: str, loss: LossArguments, micro: MicroBatch) -> Reducer:
    """Return the reducer that the function at ``path`` makes for ``micro``; its signature says which form it has.

    For an empty micro-batch the loss is 0, and the function is not called.

    Raises:
        ValueError: If the function cannot be imported or has neither form, or if its reducer returns anything but a
            scalar tensor.
    """
    function = load_function(path, REDUCER_FLAG)
    num_arguments = num_reducer_arguments(function, path)
    if not micro.response_lengths:
        return lambda losses: losses.sum()
    whole_mask = whole_responses(micro.loss_mask, micro)
    loss_masks: tuple[torch.Tensor, ...] = whole_mask.split(list(micro.response_lengths))
    if num_arguments == 1:
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


def _columns(micro: MicroBatch, log_probs: torch.Tensor) -> dict[str, Any]:
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


def _check_tensor(found: Any, shape: tuple[int, ...], who: str) -> None:
    import torch

    if not isinstance(found, torch.Tensor) or tuple(found.shape) != shape:
        what = f"shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        wanted = "a scalar tensor" if not shape else f"a tensor of shape {shape}"
        raise ValueError(f"{who}: returned {what}; return {wanted}")


def _check_metrics(metrics: Mapping[str, Any], names: tuple[str, ...], path: str) -> None:
    if set(metrics) != set(names):
        raise ValueError(
            f"{LOSS_FLAG} {path}: returned the metrics {sorted(metrics)}, and its attribute metrics declares "
            f"{sorted(names)}; declare those that it returns"
        )
    for name, value in metrics.items():
        _check_tensor(value, (), f"{LOSS_FLAG} {path}, metric {name}")


def _checked(reducer: Any, path: str, micro: MicroBatch, divisor: int) -> Reducer:
    """``reducer`` over whole responses: ranks that share the samples each give it all, and one of them counts."""
    if not callable(reducer):
        raise ValueError(
            f"{REDUCER_FLAG} {path}: returned {type(reducer).__name__}; return a function of the per-token losses"
        )

    import torch

    def reduce(values: torch.Tensor) -> torch.Tensor:
        result = reducer(whole_responses(values.float(), micro))
        if not isinstance(result, torch.Tensor) or result.dim() != 0:
            found = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
            raise ValueError(f"{REDUCER_FLAG} {path}: its reducer returned {found}; return a scalar tensor")
        result = result.float() / divisor
        return count_once(result, micro)

    return reduce
