"""Declare the user's own functions: advantages, token losses, a whole loss, importance weights, the reducer of pg_loss.

Every hook is ``module:function`` or ``module.function``, takes one argument that this file declares, and sees whole
samples at any context-parallel size. ``check_hooks`` imports all of them and reads their signatures before a run starts
(docs/objective-hooks.md has an example of each).

A function that can say that a sample of advantage 0 has no gradient sets ``function.zero_advantage_has_gradient =
False``. Until it does, every sample is trained on.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from miles.base.flags import flag_name
from miles.base.user_code.loading import load_function
from miles.compat.losses.modules import offer_related_modules

if TYPE_CHECKING:
    import numpy as np
    import torch

    from miles.objective.aggregation import Reducer
    from miles.objective.settings import LossArguments


# Start-up ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hook:
    """A flag that names a function of the user's.

    Attributes:
        field: The flag's field in ``LossArguments``.
        inputs: The name of the one argument's type.
    """

    field: str
    inputs: str

    @property
    def flag(self) -> str:
        """The flag as it is written."""
        return flag_name(self.field)

    def path(self, loss: LossArguments) -> str | None:
        """Return the import path that the flag gives; None if it is not given."""
        path: str | None = getattr(loss, self.field)
        return path

    def load(self, path: str) -> Callable[..., Any]:
        """Import the function at ``path``, and check its signature.

        Raises:
            ValueError: If it cannot be imported, or cannot be called as this file says.
        """
        function = self._imported(path)
        self.check_signature(function, path)
        return function

    def _imported(self, path: str) -> Callable[..., Any]:
        """Import the function at ``path``; its file may import what losses of related launchers do."""
        offer_related_modules()
        return load_function(path, self.flag)

    def check_signature(self, function: Callable[..., Any], path: str) -> None:
        """Raise ``ValueError`` if ``function`` cannot be called with one argument."""
        if not _accepts(function, 1):
            raise self.wrong_signature(function, path, f"one {self.inputs} (miles.objective.hooks)", "this signature")

    def wrong_signature(self, function: Callable[..., Any], path: str, wanted: str, which: str) -> ValueError:
        """Make the error that names the signature, and the one or those that are wanted."""
        signature = inspect.signature(function)
        return ValueError(
            f"{self.flag} {path}: its signature is {signature}, and it must take {wanted}; give it {which}"
        )

    def zero_advantage_has_gradient(self, path: str) -> bool:
        """Return what the function says of samples of advantage 0; true until it says no."""
        return bool(getattr(self.load(path), "zero_advantage_has_gradient", True))

    def check_tensor(self, path: str, returned: Any, shape: tuple[int, ...], what: str = "") -> None:
        """Raise ``ValueError`` if what the function returned is not a tensor of ``shape``.

        ``what`` names the result if it is a part of what was returned, or was returned later.
        """
        import torch

        if not isinstance(returned, torch.Tensor) or tuple(returned.shape) != shape:
            kind = f"shape {tuple(returned.shape)}" if isinstance(returned, torch.Tensor) else type(returned).__name__
            wanted = "a scalar tensor" if not shape else f"a tensor of shape {shape}"
            raise ValueError(f"{self.flag} {path}{what}: returned {kind}; return {wanted}")


class AdvantageHook(Hook):
    """The hook of advantages, whose parameter's name says which phase it computes."""

    def phase(self, path: str) -> int:
        """Return 1 if the parameter is called ``samples``, 2 if ``trajectories``."""
        function = self._imported(path)
        phase = {"samples": 1, "trajectories": 2}.get(" ".join(inspect.signature(function).parameters))
        if phase is None:
            wanted = (
                "one parameter, named samples (AdvantageSamples: one number per sample) or trajectories (a list of "
                "AdvantageTrajectory: one per token)"
            )
            raise self.wrong_signature(function, path, wanted, "one of these signatures")
        return phase

    def check_signature(self, function: Callable[..., Any], path: str) -> None:
        """Raise ``ValueError`` if the parameter has neither name."""
        self.phase(path)


class ReducerHook(Hook):
    """The hook of pg_loss's reducer, which has two forms."""

    def num_arguments(self, function: Callable[..., Any], path: str) -> int:
        """Return 1 or 4: with how many positional arguments the function can be called."""
        for count in (4, 1):
            if _accepts(function, count):
                return count
        wanted = (
            f"one {self.inputs} (miles.objective.hooks), or total_lengths, response_lengths, loss_masks, "
            "calculate_per_token_loss"
        )
        raise self.wrong_signature(function, path, wanted, "one of these signatures")

    def check_signature(self, function: Callable[..., Any], path: str) -> None:
        """Raise ``ValueError`` if the function has neither form."""
        self.num_arguments(function, path)


class WholeLossHook(Hook):
    """The hook of a whole loss, which has two forms: ours, and that of related launchers (launcher_losses/)."""

    def num_arguments(self, function: Callable[..., Any], path: str) -> int:
        """Return 1 or 4: with how many positional arguments the function can be called."""
        for count in (1, 4):
            if _accepts(function, count):
                return count
        wanted = f"one {self.inputs} (miles.objective.hooks), or args, batch, logits, sum_of_sample_mean"
        raise self.wrong_signature(function, path, wanted, "one of these signatures")

    def check_signature(self, function: Callable[..., Any], path: str) -> None:
        """Raise ``ValueError`` if the function has neither form."""
        self.num_arguments(function, path)


class DataPostprocessHook(Hook):
    """The hook of what an iteration trains on (batch/data_postprocess.py), which has three forms."""

    def num_arguments(self, function: Callable[..., Any], path: str) -> int:
        """Return 3, 2 or 1: with how many positional arguments the function is called."""
        for count in (3, 2, 1):
            if _accepts(function, count):
                return count
        wanted = "args, rollout_id, rollout_data, or args, rollout_data, or args"
        raise self.wrong_signature(function, path, wanted, "one of these signatures")

    def check_signature(self, function: Callable[..., Any], path: str) -> None:
        """Raise ``ValueError`` if the function has none of the forms."""
        self.num_arguments(function, path)

    def fault(self, path: str, what: str) -> ValueError:
        """Make the error about what the function has done."""
        return ValueError(f"{self.flag} {path}: {what}")


def _accepts(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


ADVANTAGES = AdvantageHook("custom_advantage_function_path", "AdvantageSamples")
POLICY_LOSS = Hook("custom_policy_loss_function_path", "PolicyLossInputs")
WHOLE_LOSS = WholeLossHook("custom_loss_function_path", "LossInputs")
IMPORTANCE = Hook("custom_tis_function_path", "ImportanceInputs")
REDUCER = ReducerHook("custom_pg_loss_reducer_function_path", "ReducerInputs")
DATA_POSTPROCESS = DataPostprocessHook("rollout_data_postprocess_path", "rollout_data")
HOOKS: tuple[Hook, ...] = (REDUCER, ADVANTAGES, POLICY_LOSS, WHOLE_LOSS, IMPORTANCE, DATA_POSTPROCESS)


def check_hooks(loss: LossArguments) -> None:
    """Import every function that is named, and read its signature, before a run starts.

    Raises:
        ValueError: If one cannot be imported, or cannot be called as this file says.
    """
    for hook in HOOKS:
        path = hook.path(loss)
        if path is not None:
            hook.load(path)
    path = ADVANTAGES.path(loss)
    if loss.use_opsm and path is not None and ADVANTAGES.phase(path) == 2:
        raise ValueError(
            f"--use-opsm: drops sequences of negative advantage, and {ADVANTAGES.flag} {path} has one for each token; "
            "drop one of the two"
        )


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
