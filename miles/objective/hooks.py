"""Call the user's own functions: advantages, token losses, a whole loss, importance weights, the reducer of pg_loss.

Every hook is ``module:function`` or ``module.function``, takes one argument that this file declares, and sees whole
samples at any context-parallel size. ``check_hooks`` imports all of them and reads their signatures before a run starts
(docs/objective-hooks.md has an example of each).

A function that can say that a sample of advantage 0 has no gradient sets ``function.zero_advantage_has_gradient =
False``. Until it does, every sample is trained on.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from miles.import_path import load_function
from miles.objective.estimators.base import Estimator, SampleRewards
from miles.objective.output import LossOutput
from miles.objective.policy_losses.base import PolicyLoss, PolicyTokens, TokenLosses
from miles.objective.registry import Needs, Term
from miles.objective.sequences import count_once, gather_whole, whole_responses

if TYPE_CHECKING:
    import numpy as np
    import torch

    from miles.objective.aggregation import Reducer
    from miles.objective.corrections import Ratios
    from miles.objective.settings import LossArguments, StepShape
    from miles.train_batch import MicroBatch

REDUCER_FLAG = "--custom-pg-loss-reducer-function-path"
ADVANTAGE_FLAG = "--custom-advantage-function-path"
POLICY_LOSS_FLAG = "--custom-policy-loss-function-path"
LOSS_FLAG = "--custom-loss-function-path"
TIS_FLAG = "--custom-tis-function-path"


# Start-up ------------------------------------------------------------------------------------------------------------


def check_hooks(loss: LossArguments) -> None:
    """Import every function that is named, and read its signature, before a run starts.

    Raises:
        ValueError: If one cannot be imported, or cannot be called as this file says.
    """
    if loss.custom_pg_loss_reducer_function_path is not None:
        path = loss.custom_pg_loss_reducer_function_path
        _positional_arguments(load_function(path, REDUCER_FLAG), path)
    if loss.custom_advantage_function_path is not None:
        phase = advantage_phase(loss.custom_advantage_function_path)
        if loss.use_opsm and phase == 2:
            raise ValueError(
                f"--use-opsm: drops sequences of negative advantage, and {ADVANTAGE_FLAG} "
                f"{loss.custom_advantage_function_path} has one for each token; drop one of the two"
            )
    if loss.custom_policy_loss_function_path is not None:
        _load(loss.custom_policy_loss_function_path, POLICY_LOSS_FLAG, "PolicyLossInputs")
    if loss.custom_loss_function_path is not None:
        _load(loss.custom_loss_function_path, LOSS_FLAG, "LossInputs")
    if loss.custom_tis_function_path is not None:
        _load(loss.custom_tis_function_path, TIS_FLAG, "ImportanceInputs")


def check_hook_flags(loss: LossArguments, errors: Any) -> None:
    """Report hooks that would be ignored, and flags that a hook takes the place of. Imports no function."""
    if loss.custom_policy_loss_function_path is not None:
        why = "with --custom-policy-loss-function-path, which takes its place"
        errors.refuse_ignored(loss, ["policy_loss"], why, "keep one of the two")
    if loss.loss_type == "custom_loss":
        if loss.custom_loss_function_path is None:
            rule = "needs the function to compute"
            errors.refuse("loss_type", "custom_loss", rule, "add --custom-loss-function-path module:function")
        _check_whole_loss(loss, errors)
    else:
        why, way_out = f"by --loss-type {loss.loss_type}", "use --loss-type custom_loss"
        errors.refuse_ignored(loss, ["custom_loss_function_path"], why, way_out)


def _check_whole_loss(loss: LossArguments, errors: Any) -> None:
    from miles.objective.corrections import CORRECTIONS

    ignored = (
        *("policy_loss", "custom_policy_loss_function_path", "get_mismatch_metrics", "loss_canary"),
        *(correction.switch for correction in CORRECTIONS),
    )
    errors.refuse_ignored(loss, ignored, "by --loss-type custom_loss", "compute it in your function")


def _load(path: str, flag: str, inputs: str) -> Callable[..., Any]:
    """The function at ``path``, which must take one argument."""
    function = load_function(path, flag)
    signature = inspect.signature(function)
    try:
        signature.bind(None)
    except TypeError:
        raise ValueError(
            f"{flag} {path}: its signature is {signature}, and it must take one {inputs} (miles.objective.hooks); "
            "give it this signature"
        ) from None
    return function


def zero_advantage_has_gradient(path: str, flag: str) -> bool:
    """Return what the function says of samples of advantage 0; true until it says no."""
    return bool(getattr(load_function(path, flag), "zero_advantage_has_gradient", True))


# Advantages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdvantageSamples:
    """What a function of phase 1 is given, on the rollout side: whole groups, one entry per sample.

    It returns one finite number per sample::

    def centred(samples: AdvantageSamples) -> list[float]:
        mean = sum(samples.rewards) / len(samples.rewards)
        return [reward - mean for reward in samples.rewards]
    """

    rewards: Sequence[float]
    group_indices: Sequence[int]
    trajectory_ids: Sequence[int]
    settings: LossArguments


@dataclass(frozen=True)
class AdvantageTrajectory:
    """What a function of phase 2 is given, on the trainer: the loss tokens of each trajectory of the step, float64 [T].

    It returns one array [T] per trajectory::

        def returns(trajectories: list[AdvantageTrajectory]) -> list[np.ndarray]:
            return [np.cumsum(trajectory.rewards[::-1])[::-1] for trajectory in trajectories]

    ``rewards`` hold the trajectory's reward as ``--advantage-estimator`` places it, less ``--kl-coef`` times the KL.
    ``values`` are the critic's, if that estimator has one, else empty.
    """

    rewards: np.ndarray
    values: np.ndarray
    settings: LossArguments


def advantage_phase(path: str) -> int:
    """Return which phase a function computes: 1 if its parameter is called ``samples``, 2 if ``trajectories``."""
    function = load_function(path, ADVANTAGE_FLAG)
    signature = inspect.signature(function)
    phase = {"samples": 1, "trajectories": 2}.get(" ".join(signature.parameters))
    if phase is None:
        raise ValueError(
            f"{ADVANTAGE_FLAG} {path}: its signature is {signature}, and it must take one parameter, named samples "
            "(AdvantageSamples: one number per sample) or trajectories (a list of AdvantageTrajectory: one per token); "
            "give it one of these signatures"
        )
    return phase


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

    def check(self, flags: Any, shape: StepShape, errors: Any) -> None:
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


# Token losses --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyLossInputs:
    """What a function of token losses is given: whole samples, ``R`` response tokens of ``S`` samples.

    It returns the loss of every token, [R]::

        def reinforce(inputs: PolicyLossInputs) -> torch.Tensor:
            return -inputs.advantages * inputs.log_probs

        reinforce.zero_advantage_has_gradient = False

    Masked tokens hold 0 in every column. Corrections, aggregation, KL and entropy follow as for other policy losses.
    """

    log_probs: torch.Tensor  # [R], with a graph
    old_log_probs: torch.Tensor  # [R], before the first step of the iteration
    rollout_log_probs: torch.Tensor  # [R], the engine's
    ref_log_probs: torch.Tensor | None  # [R], with --use-kl-loss
    advantages: torch.Tensor  # [R]
    loss_mask: torch.Tensor  # [R], 0/1
    sample_index: torch.Tensor  # int64 [R]: the sample of each token
    response_lengths: tuple[int, ...]  # S entries
    total_lengths: tuple[int, ...]  # S entries, prompt + response
    num_trajectories: int  # N of the whole step
    num_loss_tokens: int  # T of the whole step
    settings: LossArguments


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
        function = _load(self.path, POLICY_LOSS_FLAG, "PolicyLossInputs")
        if not tokens.micro.response_lengths:
            return TokenLosses(tokens.log_probs, None)
        given = PolicyLossInputs(**_columns(tokens.micro, tokens.log_probs), settings=flags)
        losses = function(given)
        _check_tensor(losses, tuple(tokens.log_probs.shape), f"{POLICY_LOSS_FLAG} {self.path}")
        # What is masked may hold anything, but its gradient must not be NaN.
        return TokenLosses(losses.float().masked_fill(tokens.micro.loss_mask == 0, 0.0), None)


def _columns(micro: MicroBatch, log_probs: torch.Tensor) -> dict[str, Any]:
    """The fields that the inputs of token losses and of a whole loss share; ``log_probs`` hold 0 where masked."""
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


# A whole loss --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossInputs(PolicyLossInputs):
    """What a whole loss is given: the same tokens, and how they are averaged.

    It returns the loss, a scalar, or ``(loss, metrics)``::

        def reinforce(inputs: LossInputs) -> torch.Tensor:
            return inputs.reduce(-inputs.advantages * inputs.log_probs) - 0.01 * inputs.mean(inputs.entropy)

    The loss is this micro-batch's share: shares are summed over micro-batches and ranks as they are. Both
    reducers map a vector [R] to such a share. The names of ``metrics`` are declared beforehand, as
    ``function.metrics = ("name", ...)``, because a micro-batch without samples reports them too.
    """

    entropy: torch.Tensor  # [R], with a graph
    reduce: Reducer  # --loss-aggregation, or the custom reducer
    mean: Reducer  # the mean of diagnostics: the sample mean, or the token mean under token_mean


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
    function = _load(path, LOSS_FLAG, "LossInputs")
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


def _check_metrics(metrics: Mapping[str, Any], names: tuple[str, ...], path: str) -> None:
    if set(metrics) != set(names):
        raise ValueError(
            f"{LOSS_FLAG} {path}: returned the metrics {sorted(metrics)}, and its attribute metrics declares "
            f"{sorted(names)}; declare those that it returns"
        )
    for name, value in metrics.items():
        _check_tensor(value, (), f"{LOSS_FLAG} {path}, metric {name}")


# Importance weights --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImportanceInputs:
    """What a function of importance weights is given: the log-probs of whole samples, without a graph.

    It returns the weight of every token loss, [R]::

        def clipped(inputs: ImportanceInputs) -> torch.Tensor:
            return (inputs.old_log_probs - inputs.rollout_log_probs).exp().clamp(max=inputs.settings.tis_clip)

    Masked tokens hold 0 in every column. Only the numerator is weighted; other corrections multiply theirs.
    """

    old_log_probs: torch.Tensor  # [R], the trainer's before the first step of the iteration
    rollout_log_probs: torch.Tensor  # [R], the engine's
    advantages: torch.Tensor  # [R]
    loss_mask: torch.Tensor  # [R], 0/1
    sample_index: torch.Tensor  # int64 [R]: the sample of each token
    response_lengths: tuple[int, ...]  # S entries
    settings: LossArguments


def custom_importance_weights(path: str, loss: LossArguments, ratios: Ratios) -> torch.Tensor:
    """Gather, call, and slice: the weights of this rank's tokens, fp32 [R], without a graph."""
    function, micro = _load(path, TIS_FLAG, "ImportanceInputs"), ratios.micro
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


# The reducer of pg_loss ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReducerInputs:
    """What a reducer may know of a micro-batch: ``S`` samples, ``R`` response tokens in all, and the step's counts.

    Samples are whole, also if context parallelism has cut them: slices are gathered beforehand.
    """

    total_lengths: tuple[int, ...]  # S entries, prompt + response
    response_lengths: tuple[int, ...]  # S entries
    loss_mask: torch.Tensor  # float32 0/1 [R]
    loss_masks: tuple[torch.Tensor, ...]  # the same, split by sample
    sample_denoms: torch.Tensor  # float32 [S]
    num_trajectories: int  # N of the whole step
    num_loss_tokens: int  # T of the whole step
    context_parallel_size: int  # ranks that share these samples; all fields here are of whole samples
    settings: LossArguments

    @property
    def num_rollouts(self) -> int:
        """The former name of ``num_trajectories``, readable for one more release."""
        warnings.warn("ReducerInputs.num_rollouts is now num_trajectories", DeprecationWarning, stacklevel=2)
        return self.num_trajectories


class PgLossReducerFactory(Protocol):
    """The form to write: called once per micro-batch, returns the reducer of its flat [R] per-token losses.

    The reducer's results are summed over micro-batches and ranks as they are, so they must be normalized by the step's
    counts::

        def dr_grpo(inputs: ReducerInputs) -> Reducer:
            weights = inputs.loss_mask / (inputs.num_trajectories * 1024)
            return lambda losses: torch.dot(losses, weights)
    """

    def __call__(self, inputs: ReducerInputs, /) -> Reducer:
        """Make the reducer of a micro-batch."""
        ...


class PositionalPgLossReducerFactory(Protocol):
    """The older form: ``(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)``.

    Its reducer, too, gets the flat [R] vector, and returns the **sum** over the samples (such as the sum of sample
    means; per token, the sum of token losses). It is divided here, by N, or by T per token.
    """

    def __call__(
        self,
        total_lengths: list[int],
        response_lengths: list[int],
        loss_masks: list[torch.Tensor],
        calculate_per_token_loss: bool,
        /,
    ) -> Reducer:
        """Make the reducer of a micro-batch."""
        ...


def get_custom_pg_loss_reducer(path: str, loss: LossArguments, micro: MicroBatch) -> Reducer:
    """Return the reducer that the function at ``path`` makes for ``micro``; its signature says which form it has.

    For an empty micro-batch the loss is 0, and the function is not called.

    Raises:
        ValueError: If the function cannot be imported or has neither form, or if its reducer returns anything but a
            scalar tensor.
    """
    function = load_function(path, REDUCER_FLAG)
    num_arguments = _positional_arguments(function, path)
    if not micro.response_lengths:
        return lambda losses: losses.sum()
    whole_mask = whole_responses(micro.loss_mask, micro)
    loss_masks: tuple[torch.Tensor, ...] = whole_mask.split(list(micro.response_lengths))  # type: ignore[no-untyped-call]
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


def _positional_arguments(function: Callable[..., Any], path: str) -> int:
    """1 or 4: with how many positional arguments ``function`` can be called."""
    signature = inspect.signature(function)
    for count in (4, 1):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count
    raise ValueError(
        f"{REDUCER_FLAG} {path}: its signature is {signature}, and it must take one ReducerInputs "
        "(miles.objective.hooks), or total_lengths, response_lengths, loss_masks, calculate_per_token_loss; "
        "give it one of these signatures"
    )


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
