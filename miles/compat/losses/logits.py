"""The stand-in for logits for a loss of related launchers: log-probs and entropy of response tokens.

Whole logits never exist here (token_log_probs.py), so ``ResponseLogits`` holds the model's results from them.
``get_log_probs_and_entropy`` reads it as its namesake there reads logits; whatever else reads logits is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from miles.base.text import InputError
from miles.objective.kl import approximate_kl
from miles.objective.policy_losses.ppo_clip import ClipFlags, clipped_losses

if TYPE_CHECKING:
    import torch

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

    own = [len(tokens) for tokens in logits.tokens], list(logits.response_lengths)
    is_own = ([int(n) for n in total_lengths], [int(n) for n in response_lengths]) == own
    if not (is_own and all(torch.equal(a, b) for a, b in zip(unconcat_tokens, logits.tokens, strict=True))):
        raise InputError(f"the loss asks for log-probs of other tokens than the samples': {NO_LOGITS}")
    found = {"log_probs": list(logits.log_probs.split(own[1]))}
    if with_entropy:
        found["entropy"] = list(logits.entropy.split(own[1]))
    return logits.log_probs.new_empty((0,)), found


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
