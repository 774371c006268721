"""Declare the user's own functions: advantages, token losses, a whole loss, importance weights, the reducer of pg_loss.

Every hook is ``module:function`` or ``module.function``, takes one argument that this file declares, and sees whole
samples at any context-parallel size. ``check_hooks`` imports all of them and reads their signatures before a run starts
(docs/objective-hooks.md has an example of each).

A function that can say that a sample of advantage 0 has no gradient sets ``function.zero_advantage_has_gradient =
False``. Until it does, every sample is trained on.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from miles.base.flags import flag_name
from miles.base.user_code import import_function, load_function
from miles.objective.estimators.base import Estimator, SampleRewards, TrajectoryTokens
from miles.objective.policy_losses.base import PolicyLoss, PolicyTokens, TokenLosses
from miles.objective.registry import Needs, Term
from miles.objective.sequences import count_once, gather_whole, whole_responses

if TYPE_CHECKING:
    import numpy as np
    import torch

    from miles.base.flags import Errors
    from miles.objective.aggregation import Reducer
    from miles.objective.registry import StepShape
    from miles.objective.settings import LossArguments
    from miles.objective.token_weights import Ratios
    from miles.types.train_batch import MicroBatch

# The adapters of other launchers' conventions, loaded like a function of the user's (compat/losses.py).
RELATED_MODULES = "miles.compat.losses:offer_related_modules"
FOUR_ARGUMENTS = "miles.compat.losses:four_argument_loss"
CHECK_OF_FOUR = "miles.compat.losses:check_four_argument_loss"

# Start-up ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hook:
    """A flag that names a function of the user's.

    Attributes:
        field: The flag's field in ``LossArguments``.
        forms: How the function may be called: the number of its positional arguments, and these in words. The first
            form that fits counts.
    """

    field: str
    forms: tuple[tuple[int, str], ...]

    @property
    def flag(self) -> str:
        """The flag as written."""
        return flag_name(self.field)

    def load(self, path: str) -> Callable[..., Any]:
        """Import the function at ``path``, and check its signature.

        Raises:
            ValueError: If it cannot be imported, or cannot be called as this file states.
        """
        function = self._imported(path)
        self.num_arguments(function, path)
        return function

    def _imported(self, path: str) -> Callable[..., Any]:
        """Import the function at ``path``; its file may import what losses of related launchers do."""
        import_function(RELATED_MODULES, self.flag)()
        return load_function(path, self.flag)

    def num_arguments(self, function: Callable[..., Any], path: str) -> int:
        """Return with how many positional arguments ``function`` is called."""
        for count, _ in self.forms:
            if _accepts(function, count):
                return count
        raise self.wrong_signature(function, path)

    def wrong_signature(self, function: Callable[..., Any], path: str) -> ValueError:
        """Make the error that names the signature, and the one or those that are wanted."""
        wanted = ", or ".join(words for _, words in self.forms)
        which = "this signature" if len(self.forms) == 1 else "one of these signatures"
        return self.fault(
            path, f"its signature is {inspect.signature(function)}, and it must take {wanted}; give it {which}"
        )

    def fault(self, path: str, what: str) -> ValueError:
        """Make the error about a fault of the function."""
        return ValueError(f"{self.flag} {path}: {what}")

    def zero_advantage_has_gradient(self, path: str) -> bool:
        """Return whether samples of advantage 0 have a gradient: the function's attribute of this name, else true."""
        return bool(getattr(self.load(path), "zero_advantage_has_gradient", True))

    def check_tensor(self, path: str, returned: Any, shape: tuple[int, ...], what: str = "") -> None:
        """Raise ``ValueError`` if the function's result is not a tensor of ``shape``.

        ``what`` names the result if it is a part of the returned value, or was returned later.
        """
        import torch

        if not isinstance(returned, torch.Tensor) or tuple(returned.shape) != shape:
            kind = f"shape {tuple(returned.shape)}" if isinstance(returned, torch.Tensor) else type(returned).__name__
            wanted = "a scalar tensor" if not shape else f"a tensor of shape {shape}"
            raise self.fault(f"{path}{what}", f"returned {kind}; return {wanted}")


class AdvantageHook(Hook):
    """The hook of advantages, whose parameter's name states which phase it computes."""

    def phase(self, path: str) -> int:
        """Return 1 if the parameter is called ``samples``, 2 if ``trajectories``."""
        function = self._imported(path)
        phase = {"samples": 1, "trajectories": 2}.get(" ".join(inspect.signature(function).parameters))
        if phase is None:
            raise self.wrong_signature(function, path)
        return phase

    def num_arguments(self, function: Callable[..., Any], path: str) -> int:
        """Return 1. Raises ``ValueError`` if the parameter has neither name."""
        self.phase(path)
        return 1


def _accepts(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


def _one(inputs: str) -> tuple[int, str]:
    return 1, f"one {inputs} (miles.objective.hooks)"


ADVANTAGES = AdvantageHook(
    "custom_advantage_function_path",
    (
        (1, "one parameter, named samples (AdvantageSamples: one number per sample)"),
        (1, "trajectories (a list of AdvantageTrajectory: one per token)"),
    ),
)
POLICY_LOSS = Hook("custom_policy_loss_function_path", (_one("PolicyLossInputs"),))
# The second form is of related launchers, and has an adapter.
WHOLE_LOSS = Hook("custom_loss_function_path", (_one("LossInputs"), (4, "args, batch, logits, sum_of_sample_mean")))
IMPORTANCE = Hook("custom_tis_function_path", (_one("ImportanceInputs"),))
REDUCER = Hook(
    "custom_pg_loss_reducer_function_path",
    ((4, "total_lengths, response_lengths, loss_masks, calculate_per_token_loss"), _one("ReducerInputs")),
)
# Of an iteration's training data (batch/convert.py).
DATA_POSTPROCESS = Hook(
    "rollout_data_postprocess_path", ((3, "args, rollout_id, rollout_data"), (2, "args, rollout_data"), (1, "args"))
)
HOOKS: tuple[Hook, ...] = (REDUCER, ADVANTAGES, POLICY_LOSS, WHOLE_LOSS, IMPORTANCE, DATA_POSTPROCESS)


def check_hooks(loss: LossArguments, args: Any) -> None:
    """Import every function that is named, and read its signature, before a run starts.

    Args:
        loss: The flags of the objective.
        args: All flags by their names, for a whole loss of other launchers: it is called once.

    Raises:
        ValueError: If one cannot be imported, or cannot be called as this file states.
    """
    for hook in HOOKS:
        if (path := getattr(loss, hook.field)) is not None:
            hook.load(path)
    path = loss.custom_advantage_function_path
    if loss.use_opsm and path is not None and ADVANTAGES.phase(path) == 2:
        raise ValueError(
            f"--use-opsm: drops sequences of negative advantage, and {ADVANTAGES.flag} {path} has one for each token; "
            "drop one of the two"
        )
    path = loss.custom_loss_function_path
    if path is not None and WHOLE_LOSS.num_arguments(WHOLE_LOSS.load(path), path) == 4:
        import_function(CHECK_OF_FOUR, WHOLE_LOSS.flag)(path, args, loss)


# Advantages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdvantageSamples:
    """The input of a function of phase 1, on the rollout side: whole groups, one entry per sample.

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
    """The input of a function of phase 2, on the trainer: the loss tokens of each trajectory of the step, float64 [T].

    It returns one array [T] per trajectory::

        def returns(trajectories: list[AdvantageTrajectory]) -> list[np.ndarray]:
            return [np.cumsum(trajectory.rewards[::-1])[::-1] for trajectory in trajectories]

    ``rewards`` hold the trajectory's reward as ``--advantage-estimator`` places it, less ``--kl-coef`` times the KL.
    ``values`` are the critic's, if that estimator has one, else empty.
    """

    rewards: np.ndarray
    values: np.ndarray
    settings: LossArguments


# Token losses --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyLossInputs:
    """The input of a function of token losses: whole samples, ``R`` response tokens of ``S`` samples.

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


# A whole loss --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossInputs(PolicyLossInputs):
    """The input of a whole loss: the same tokens, and how they are averaged.

    It returns the loss, a scalar, or ``(loss, metrics)``::

        def reinforce(inputs: LossInputs) -> torch.Tensor:
            return inputs.reduce(-inputs.advantages * inputs.log_probs) - 0.01 * inputs.mean(inputs.entropy)

    The loss is this micro-batch's share: shares are summed over micro-batches and ranks unchanged. Both
    reducers map a vector [R] to such a share. The names of ``metrics`` are declared beforehand, as
    ``function.metrics = ("name", ...)``, because a micro-batch without samples reports them too.
    """

    entropy: torch.Tensor  # [R], with a graph
    reduce: Reducer  # --loss-aggregation, or the custom reducer
    mean: Reducer  # the mean of diagnostics: the sample mean, or the token mean under token_mean


# Importance weights --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImportanceInputs:
    """The input of a function of importance weights: the log-probs of whole samples, without a graph.

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


# The reducer of pg_loss ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReducerInputs:
    """The input of a function that makes a reducer: a micro-batch of ``S`` samples, ``R`` response tokens in all.

    It is called once per micro-batch, and returns the reducer of the flat [R] per-token losses. The reducer's results
    are summed over micro-batches and ranks unchanged, so they must be normalized by the step's counts::

        def dr_grpo(inputs: ReducerInputs) -> Reducer:
            weights = inputs.loss_mask / (inputs.num_trajectories * 1024)
            return lambda losses: torch.dot(losses, weights)

    Samples are whole, also if context parallelism has cut them: slices are gathered beforehand.

    A function may also have the older form ``(total_lengths, response_lengths, loss_masks,
    calculate_per_token_loss)``. Its reducer, too, gets the flat [R] vector, and returns the **sum** over the samples
    (such as the sum of sample means; per token, the sum of token losses). It is divided here, by N, or by T per token.
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


# Calls of the functions instead of a built-in part of the objective, with checks of what they return.
#
# Functions see whole samples. One whose result has no graph is called on gathered columns, and its result is sliced.
# Losses are evaluated whole on every rank of the context group and counted once (sequences.py).


class CustomAdvantages(Estimator[Any]):
    """An estimator with one phase computed by the user's function. Everything else stays the chosen estimator's."""

    summary = "computed by your function"

    def __init__(self, path: str, estimator: Estimator[Any]) -> None:
        self.path = path
        self.estimator = estimator
        self.name, self.reads = estimator.name, estimator.reads
        for attribute in Estimator.__annotations__:
            setattr(self, attribute, getattr(estimator, attribute))

    def needs(self, flags: LossArguments) -> Needs:
        """Return the needs of the chosen estimator."""
        return self.estimator.needs(flags)

    def token_needs(self, flags: LossArguments) -> Needs:
        """Return ``needs`` without the quantities that a function of phase 2 does not see."""
        needs = self.needs(flags)
        if needs.sum_squared_probs and ADVANTAGES.phase(self.path) == 2:
            return replace(needs, sum_squared_probs=False)
        return needs

    def check(self, flags: LossArguments, shape: StepShape, errors: Errors) -> None:
        """Run the checks of the chosen estimator."""
        self.estimator.check(flags, shape, errors)

    def formula(self, flags: LossArguments) -> list[Term]:
        """Return the call of the function."""
        return [Term(f"A = {self.path}(...) instead of --advantage-estimator {self.name}", __name__, self.path)]

    def smallest_group(self, flags: LossArguments) -> int:
        """Return the chosen estimator's if it compares in phase 2, which may follow; else the function may do without.

        Flags are checked before the function is imported, so its phase is not known here.
        """
        return self.estimator.smallest_group(flags) if self.reads_score_norms else 1

    def estimates_by_token(self, flags: LossArguments) -> bool:
        """Return whether phase 2 runs."""
        return ADVANTAGES.phase(self.path) == 2 or self.estimator.estimates_by_token(flags)

    def sample_advantages(self, flags: LossArguments, samples: SampleRewards) -> list[float]:
        """Call a function of phase 1, and check its result."""
        if ADVANTAGES.phase(self.path) == 2:
            return self.estimator.sample_advantages(flags, samples)
        function = ADVANTAGES.load(self.path)
        inputs = AdvantageSamples(samples.rewards, samples.group_indices, samples.trajectory_ids, flags)
        result = [float(advantage) for advantage in function(inputs)]
        if len(result) != len(samples.rewards) or not all(map(math.isfinite, result)):
            raise ValueError(
                f"{ADVANTAGES.flag} {self.path}: returned {len(result)} numbers for {len(samples.rewards)} samples, or "
                "one that is not finite; return one finite number per sample"
            )
        return result

    def token_advantages(self, flags: LossArguments, trajectories: Sequence[TrajectoryTokens]) -> list[np.ndarray]:
        """Call a function of phase 2, and check its result; after one of phase 1 compute the chosen estimator's."""
        if ADVANTAGES.phase(self.path) == 1:
            return self.estimator.token_advantages(flags, trajectories)
        import numpy as np

        function = ADVANTAGES.load(self.path)
        inputs = [AdvantageTrajectory(each.rewards, each.values, flags) for each in trajectories]
        result = [np.asarray(advantages, np.float64) for advantages in function(inputs)]
        shapes, wanted = [a.shape for a in result], [each.rewards.shape for each in trajectories]
        if shapes != wanted or not all(np.isfinite(a).all() for a in result):
            raise ValueError(
                f"{ADVANTAGES.flag} {self.path}: returned arrays of shapes {shapes}, wanted are {wanted}, all finite; "
                "return one finite number per loss token"
            )
        return result

    def returns(
        self, flags: LossArguments, trajectories: Sequence[TrajectoryTokens], advantages: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the chosen estimator's."""
        return self.estimator.returns(flags, trajectories, advantages)


class CustomPolicyLoss(PolicyLoss[Any]):
    """The policy loss of ``--custom-policy-loss-function-path``."""

    name = "custom"
    summary = "computed by your function"
    sees_whole_samples: ClassVar[bool] = True

    def __init__(self, path: str) -> None:
        self.path = path

    def formula(self, flags: LossArguments) -> list[Term]:
        """Return the call of the function."""
        return [Term(f"{self.path}(log p, log p_old, A, ...)", __name__, self.path)]

    def zero_advantage_has_gradient(self, flags: LossArguments) -> bool:
        """Return the function's attribute of this name; true if it has none."""
        return POLICY_LOSS.zero_advantage_has_gradient(self.path)

    def token_losses(self, flags: LossArguments, tokens: PolicyTokens) -> TokenLosses:
        """Call the function. A micro-batch without samples is not shown to it."""
        function = POLICY_LOSS.load(self.path)
        if not tokens.micro.response_lengths:
            return TokenLosses(tokens.log_probs, None)
        inputs = PolicyLossInputs(**token_columns(tokens.micro, tokens.log_probs), settings=flags)
        losses = function(inputs)
        POLICY_LOSS.check_tensor(self.path, losses, tuple(tokens.log_probs.shape))
        # Masked tokens may hold anything, but their gradient must not be NaN.
        return TokenLosses(losses.float().masked_fill(tokens.micro.loss_mask == 0, 0.0), None)


def custom_importance_weights(path: str, loss: Any, ratios: Ratios) -> torch.Tensor:
    """Gather, call, and slice: the weights of this rank's tokens, fp32 [R], without a graph."""
    function = IMPORTANCE.load(path)
    micro = ratios.micro
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
    """Return the reducer that the function at ``path`` makes for ``micro``; its signature states which form it has.

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
    masked = micro.loss_mask == 0

    def column(values: torch.Tensor) -> torch.Tensor:
        return values.masked_fill(masked, 0.0)

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
    """Return ``reducer`` over whole responses: ranks that share samples each give it all, and one of them counts."""
    if not callable(reducer):
        raise ValueError(
            f"{REDUCER.flag} {path}: returned {type(reducer).__name__}; return a function of the per-token losses"
        )

    def reduce(values: torch.Tensor) -> torch.Tensor:
        result = reducer(whole_responses(values.float(), micro))
        REDUCER.check_tensor(path, result, (), ", its reducer")
        return count_once(result.float() / divisor, micro)

    return reduce
