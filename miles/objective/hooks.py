"""The user's own reducer of the policy loss, ``--custom-pg-loss-reducer-function-path``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from miles.import_path import load_function
from miles.objective.sequences import whole_responses

if TYPE_CHECKING:
    import torch

    from miles.objective.aggregation import Reducer
    from miles.objective.settings import LossArguments
    from miles.train_batch import MicroBatch

_FLAG = "--custom-pg-loss-reducer-function-path"


@dataclass(frozen=True)
class ReducerInputs:
    """What a reducer may know of a micro-batch: ``S`` samples, ``R`` response tokens in all, and the step's counts.

    Samples are whole, also where context parallelism has cut them: what would be a slice is gathered beforehand.
    """

    total_lengths: tuple[int, ...]  # S entries, prompt + response
    response_lengths: tuple[int, ...]  # S entries
    loss_mask: torch.Tensor  # float32 0/1 [R]
    loss_masks: tuple[torch.Tensor, ...]  # the same, split by sample
    sample_denoms: torch.Tensor  # float32 [S]
    num_trajectories: int  # N of the whole step
    num_loss_tokens: int  # T of the whole step
    context_parallel_size: int  # ranks that share these samples; what is given here is whole all the same
    settings: LossArguments

    @property
    def num_rollouts(self) -> int:
        """The former name of ``num_trajectories``, readable for one more release."""
        warnings.warn("ReducerInputs.num_rollouts is now num_trajectories", DeprecationWarning, stacklevel=2)
        return self.num_trajectories


class PgLossReducerFactory(Protocol):
    """The form to write: called once a micro-batch, returns the reducer of its flat [R] per-token losses.

    What the reducer returns is summed over micro-batches and ranks as it is, so it must hold the step's normalization::

        def dr_grpo(inputs: ReducerInputs) -> Reducer:
            weights = inputs.loss_mask / (inputs.num_trajectories * 1024)
            return lambda losses: torch.dot(losses, weights)
    """

    def __call__(self, inputs: ReducerInputs, /) -> Reducer: ...


class PositionalPgLossReducerFactory(Protocol):
    """The older form: ``(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)``.

    Its reducer, too, gets the flat [R] vector, and returns the **sum** over the samples of what each is worth (such as
    the sum of sample means; per token, the sum of token losses). It is divided here, by N, or by T per token.
    """

    def __call__(
        self,
        total_lengths: list[int],
        response_lengths: list[int],
        loss_masks: list[torch.Tensor],
        calculate_per_token_loss: bool,
        /,
    ) -> Reducer: ...


def get_custom_pg_loss_reducer(path: str, loss: LossArguments, micro: MicroBatch) -> Reducer:
    """The reducer that the function at ``path`` makes for ``micro``; which form it has is read from its signature.

    An empty micro-batch is worth zero, and the function is not called. Raises ``ValueError`` if the function cannot be
    imported or has neither form, or if its reducer returns anything but a scalar tensor.
    """
    function = load_function(path, _FLAG)
    num_arguments = _positional_arguments(function, path)
    if not micro.response_lengths:
        return lambda losses: losses.sum()
    whole_mask = whole_responses(micro.loss_mask, micro)
    loss_masks = whole_mask.split(list(micro.response_lengths))
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


def check_custom_reducer(loss: LossArguments) -> None:
    """Import the reducer that is named, if any, and read its signature, before a run starts. Raises ``ValueError``."""
    path = loss.custom_pg_loss_reducer_function_path
    if path is not None:
        _positional_arguments(load_function(path, _FLAG), path)


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
        f"{_FLAG} {path}: its signature is {signature}, and it must take one ReducerInputs "
        "(miles.objective.hooks), or total_lengths, response_lengths, loss_masks, calculate_per_token_loss; "
        "give it one of these signatures"
    )


def _checked(reducer: Any, path: str, micro: MicroBatch, divisor: int) -> Reducer:
    """``reducer`` over whole responses: ranks that share the samples each give it all, and one of them counts."""
    if not callable(reducer):
        raise ValueError(
            f"{_FLAG} {path}: returned {type(reducer).__name__}; return a function of the per-token losses"
        )

    import torch

    def reduce(values: torch.Tensor) -> torch.Tensor:
        result = reducer(whole_responses(values.float(), micro))
        if not isinstance(result, torch.Tensor) or result.dim() != 0:
            found = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
            raise ValueError(f"{_FLAG} {path}: its reducer returned {found}; return a scalar tensor")
        result = result.float() / divisor
        return result if micro.context.rank == 0 else result - result.detach()

    return reduce
