"""Call a whole loss of a related launcher such as slime: ``loss(args, batch, logits, sum_of_sample_mean)``.

Related launchers call it for a micro-batch, and divide the result by the step's count: its trajectories N, or per token
its tokens T. So does this file. ``sum_of_sample_mean`` is the default reducer times that count, so a loss that reduces
with it is the same for every split of the step.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from miles.base.text import InputError
from miles.objective.aggregation import get_sum_of_sample_mean, is_per_token, is_plain_mean
from miles.objective.hooks import REDUCER, WHOLE_LOSS, token_columns
from miles.objective.kl import approximate_kl
from miles.objective.policy_losses.ppo_clip import ClipFlags, clipped_losses

if TYPE_CHECKING:
    import torch

    from miles.objective.loss_types.base import Objective
    from miles.objective.settings import LossArguments
    from miles.types.train_batch import MicroBatch


# The stand-in for logits for a loss of related launchers: log-probs and entropy of response tokens.
#
# Whole logits never exist here (token_log_probs.py), so ``ResponseLogits`` holds the model's results from them.
# ``get_log_probs_and_entropy`` reads it as its namesake there reads logits; whatever else reads logits is refused.


NO_LOGITS = (
    "whole logits do not exist in this launcher; read log-probs and entropy with get_log_probs_and_entropy "
    "(docs/objective-hooks.md)"
)


@dataclass(frozen=True, eq=False)
class ResponseLogits:
    """Log-probs and entropy of ``R`` response tokens of ``S`` samples, instead of the logits.

    Attributes:
        log_probs: Of the samples' own tokens, at the rollout's temperature, fp32 [R], with a graph.
        entropy: In nats, fp32 [R], with a graph.
        tokens: Prompt and response of each sample, int64.
        response_lengths: S entries.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    tokens: tuple[torch.Tensor, ...]
    response_lengths: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.log_probs.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of log-probs."""
        return self.log_probs.dtype

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(f"the loss reads logits.{name}: {NO_LOGITS}")

    def _refuse(self, *_: Any) -> NoReturn:
        raise InputError(f"the loss computes with logits as with a tensor: {NO_LOGITS}")

    __getitem__ = __len__ = __iter__ = __add__ = __radd__ = __sub__ = __rsub__ = _refuse
    __mul__ = __rmul__ = __truediv__ = __matmul__ = __neg__ = _refuse


def get_log_probs_and_entropy(
    logits: ResponseLogits,
    *,
    args: Any = None,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    max_seq_lens: Sequence[int] | None = None,
    top_p_token_ids: None = None,
    top_p_token_offsets: None = None,
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """Return an empty tensor, and ``log_probs`` (and ``entropy``) of the responses, one tensor per sample.

    The temperature, and the token sets of truncated sampling, are in them already; ``args`` is not read.

    Raises:
        InputError: For log-probs of other tokens than the micro-batch's, which need whole logits.
    """
    import torch

    lengths = list(logits.response_lengths)
    asked = [int(n) for n in total_lengths], [int(n) for n in response_lengths]
    has_lengths = asked == ([len(tokens) for tokens in logits.tokens], lengths)
    if not (has_lengths and all(torch.equal(a, b) for a, b in zip(unconcat_tokens, logits.tokens, strict=True))):
        raise InputError(f"the loss asks for log-probs of other tokens than the samples': {NO_LOGITS}")
    outputs = {"log_probs": list(logits.log_probs.split(lengths))}
    if with_entropy:
        outputs["entropy"] = list(logits.entropy.split(lengths))
    return logits.log_probs.new_empty((0,)), outputs


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    kl_loss_type: Any,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Estimate the KL of each token (kl.py), weighted by ``importance_ratio`` if that is given."""
    kl = approximate_kl(log_probs.float() - log_probs_base.float(), kl_loss_type)
    return kl if importance_ratio is None else importance_ratio * kl


def compute_policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's token losses and what was clipped; ``ppo_kl`` is log old policy - log policy."""
    losses = clipped_losses(-ppo_kl, advantages, ClipFlags(eps_clip, eps_clip_high, eps_clip_c))
    assert losses.clipped is not None, "PPO states what it clips"
    return losses.losses, losses.clipped


_NAMES = {"log_probs": "old_log_probs"}  # theirs -> ours, if they differ
_COLUMNS = ("advantages", "log_probs", "rollout_log_probs", "ref_log_probs")


class Batch(dict[str, Any]):
    """The samples of a micro-batch by column: lists with one entry per sample, as related launchers name them."""

    def __missing__(self, name: str) -> Any:
        raise InputError(f"the loss reads batch[{name!r}], which is not here; a batch has {', '.join(sorted(self))}")


def four_argument_loss(
    objective: Objective,
    micro: MicroBatch,
    whole: MicroBatch,
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return this micro-batch's share of the step's loss, and of each metric, by a function of four arguments.

    Args:
        objective: The objective, with all flags by their names in ``args``.
        micro: The micro-batch.
        whole: The same with whole responses.
        log_probs: Log-probs of the current policy, fp32 [R], with a graph; 0 for masked tokens.
        entropy: Its entropy, the same.

    Raises:
        ValueError: If it returns anything but a scalar tensor, or that and numbers by name.
        InputError: If it reads what is not here.
    """
    loss = objective.flags
    path = loss.custom_loss_function_path
    assert path is not None, "validate() demands --custom-loss-function-path"
    tokens = sample_tokens(micro)
    if not micro.response_lengths:
        names = try_four_arguments(path, objective.args, loss, log_probs.device)
        return log_probs.sum() + entropy.sum(), dict.fromkeys(names, log_probs.new_zeros(()))
    return _call(path, objective.args, loss, whole, tokens, log_probs, entropy)


def _call(
    path: str,
    args: Any,
    loss: LossArguments,
    whole: MicroBatch,
    tokens: Sequence[torch.Tensor],
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    import torch

    function = WHOLE_LOSS.load(path)
    count = max(whole.num_loss_tokens, 1) if is_per_token(loss) else whole.num_trajectories
    mean = get_sum_of_sample_mean(whole, is_per_token(loss))

    def sum_of_sample_mean(values: torch.Tensor) -> torch.Tensor:
        return mean(values) * count

    logits = ResponseLogits(log_probs, entropy, tuple(tokens), whole.response_lengths)
    try:
        output = function(args, _batch(whole, tokens, log_probs), logits, sum_of_sample_mean)
    except InputError as error:
        raise InputError(f"{WHOLE_LOSS.flag} {path}: {error}") from error
    total, metrics = output if isinstance(output, tuple) and len(output) == 2 else (output, {})
    WHOLE_LOSS.check_tensor(path, total, ())
    if not isinstance(metrics, Mapping):
        raise ValueError(f"{WHOLE_LOSS.flag} {path}: returned metrics of type {type(metrics).__name__}; return a dict")
    shares = {}
    for name, value in metrics.items():
        if isinstance(value, numbers.Real):
            value = torch.tensor(float(value), device=log_probs.device)
        WHOLE_LOSS.check_tensor(path, value, (), f", metric {name}")
        shares[str(name)] = value.detach().float() / count
    return total.float() / count, shares


def _batch(whole: MicroBatch, tokens: Sequence[torch.Tensor], log_probs: torch.Tensor) -> Batch:
    lengths = list(whole.response_lengths)
    columns = token_columns(whole, log_probs)
    batch = Batch(
        unconcat_tokens=list(tokens),
        tokens=list(tokens),
        total_lengths=list(whole.total_lengths),
        response_lengths=lengths,
        loss_masks=list(whole.loss_mask.split(lengths)),
        rollout_mask_sums=whole.trajectory_token_counts.detach(),
    )
    offered = {name: columns[_NAMES.get(name, name)] for name in _COLUMNS}
    offered |= {"values": whole.values, "returns": whole.returns}
    for name, column in offered.items():
        if column is not None:
            batch[name] = list(column.split(lengths))
    return batch


def sample_tokens(micro: MicroBatch) -> list[torch.Tensor]:
    """Return prompt and response of each sample, int64; collective in the micro-batch's context group."""
    import torch

    from miles.types.parallel import padded_length

    if not micro.response_lengths:
        return []
    flat = micro.context.gather(micro.input_ids)[micro.token_index.to(micro.input_ids.device)]
    parts = flat.split([padded_length(length, micro.context.size) for length in micro.read_lengths])
    read = [part[:length] for part, length in zip(parts, micro.read_lengths, strict=True)]
    if micro.read_lengths == micro.total_lengths:
        return read
    assert micro.context.size == 1, "ranks that share samples read all tokens"
    targets = micro.targets.split(micro.response_lengths)
    unread = [total - length for total, length in zip(micro.total_lengths, micro.read_lengths, strict=True)]
    return [torch.cat([part, target[len(target) - n :]]) for part, target, n in zip(read, targets, unread, strict=True)]


def check_four_argument_loss(path: str, args: Any, loss: LossArguments) -> None:
    """Call a loss with four arguments on a sample of two tokens, before a run starts.

    Only a call shows which columns it reads.

    Args:
        path: The function.
        args: All flags by their names.
        loss: The flags of the objective.

    Raises:
        InputError: If it reads data that is not here, or if a flag is set that it would ignore.
        ValueError: If it returns something else than a loss.
    """
    ignored = {
        "--loss-aggregation": None if is_plain_mean(loss) else loss.loss_aggregation,
        REDUCER.flag: loss.custom_pg_loss_reducer_function_path,
    }
    for flag, value in ignored.items():
        if value is not None:
            raise InputError(
                f"{flag} {value}: would be ignored by {WHOLE_LOSS.flag} {path}, whose sum_of_sample_mean is the mean "
                "of samples, or of tokens under token_mean; drop it, or write the loss with one LossInputs, "
                "whose reduce follows it"
            )
    try_four_arguments(path, args, loss)


def try_four_arguments(
    path: str, args: Any, loss: LossArguments, device: torch.device | str = "cpu"
) -> tuple[str, ...]:
    """Call the function at ``path`` on a sample of two tokens; returns the names of its metrics.

    A rank without samples reports the same metrics as others, and these names are known only to the function.
    """
    import torch

    from miles.types.groups import ALONE
    from miles.types.train_batch import MicroBatch

    ones = torch.ones(1, device=device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    has_critic = loss.has_critic
    whole = MicroBatch(
        input_ids=tokens,
        position_ids=torch.arange(2, device=device),
        token_index=torch.arange(2),
        logit_index=index,
        targets=index,
        sample_index=index,
        response_index=index,
        loss_mask=ones,
        advantages=ones,
        rollout_log_probs=-ones,
        old_log_probs=-ones,
        ref_log_probs=-ones if loss.needs_reference else None,
        sample_denoms=ones,
        trajectory_token_counts=ones,
        response_lengths=(1,),
        total_lengths=(2,),
        read_lengths=(2,),
        num_trajectories=1,
        num_loss_tokens=1,
        context=ALONE,
        values=ones if has_critic else None,
        returns=ones if has_critic else None,
    )
    log_probs = (-ones).requires_grad_()
    result = _call(path, args, loss, whole, [tokens], log_probs, ones.clone().requires_grad_())
    return tuple(result[1])


# The module names under which related launchers keep what their losses import, so that such a file loads unchanged.

_LOSS = {
    f"{package}.{module}"
    for package in ("slime", "miles")
    for module in ("backends.megatron_utils.loss", "backends.training_utils.loss", "utils.ppo_utils", "utils.types")
}
_PACKAGES = {name.rsplit(".", depth)[0] for name in _LOSS for depth in (1, 2, 3)} - _LOSS - {"miles"}


class _RelatedModules(MetaPathFinder, Loader):
    """Finds these modules after all other finders: one that is installed comes first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return our module for a name of theirs."""
        if fullname in _LOSS or fullname in _PACKAGES:
            return ModuleSpec(fullname, self, is_package=fullname in _PACKAGES)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module with what this file has."""
        offered: dict[str, Any] = {
            "get_log_probs_and_entropy": get_log_probs_and_entropy,
            "compute_approx_kl": compute_approx_kl,
            "compute_policy_loss": compute_policy_loss,
            "RolloutBatch": dict[str, Any],
        }
        if module.__name__ in _LOSS:
            vars(module).update(offered)

        def missing(name: str) -> NoReturn:
            if name.startswith("__"):
                raise AttributeError(name)
            raise ImportError(
                f"{module.__name__}.{name} is part of another launcher, and is not here; a loss can import "
                f"{', '.join(offered)}"
            )

        vars(module)["__getattr__"] = missing


_FINDER = _RelatedModules()


def offer_related_modules() -> None:
    """Let later imports in this process find these modules, if none are installed."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
