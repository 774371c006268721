"""Losses that are computed inside the model, beside the policy loss: the routers' (router.py) and MTP's (mtp.py).

They are not added to the loss that the schedule sees, because it may be on another pipeline stage. Instead their
gradient is attached to an activation (``attach``), so the schedule's factor does not apply to them;
``MegatronLossScaling.auxiliary_loss_factor`` does, for either contract with Megatron. With it, each loss obeys the rule
of docs/loss-aggregation.md: a token's share is divided by a count of the whole step, and gradients are sums.

Megatron 0.16.1 divides by counts of a rank and a micro-batch instead, which is right only for equal micro-batches under
the averaging contract. With ``calculate_per_token_loss`` it scales router losses by the tokens that a rank routed and
divides by the loss tokens (transformer/moe/router.py, ``attach_and_log_load_balancing_loss`` and ``apply_z_loss``), so
they are (routed / loss tokens) times too strong, and TP * CP times too weak if ranks share a sequence. Megatron's
router losses are therefore off, and the model has these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from miles.config.megatron.settings import MegatronArguments
from miles.training.megatron.process_groups import Ranks
from miles.types.metrics import Metric
from miles.types.train_batch import TrainShard


def attach(activation: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Return ``activation``. Its backward pass gives ``loss``, a scalar, a gradient of 1."""
    apply: Callable[..., torch.Tensor] = _Attached.apply
    return apply(activation, loss)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.like = loss.detach()
        return activation.view_as(activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, torch.ones_like(ctx.like)


@dataclass
class AuxiliaryStep:
    """The divisors of one step's losses, and their sums so far on this rank.

    ``routed_tokens`` counts every token of every sample that is trained on, including prompts, without padding; a
    token that several samples share counts once for each. ``mtp_targets[k]`` counts the loss tokens that head k can
    predict: those with k + 2 tokens before them. Both cover the whole step.
    """

    sizes: MegatronArguments
    routed_tokens: float
    mtp_targets: tuple[float, ...]
    auxiliary_loss_factor: float  # of loss_scaling.py
    sums: torch.Tensor  # float64 [3]: this rank's part of balance loss, z-loss and MTP loss, without coefficients

    @classmethod
    def of(cls, shard: TrainShard, sizes: MegatronArguments, ranks: Ranks, device: torch.device) -> AuxiliaryStep:
        """Count the step. Collective over the token group; the caller sets ``auxiliary_loss_factor``."""
        mine = [0.0] * (1 + sizes.mtp_heads)
        for plan in shard.micro_batches:
            for i in plan.samples:
                whole = _counts(shard, i, sizes.mtp_heads)
                mine = [m + n / plan.context_parallel_size for m, n in zip(mine, whole, strict=True)]
        counts = torch.tensor(mine, dtype=torch.float64, device=device)
        dist.all_reduce(counts, group=ranks.token_group)
        routed, *targets = counts.tolist()
        return cls(sizes, routed, tuple(targets), 0.0, torch.zeros(3, dtype=torch.float64, device=device))

    def saw_router(self, balance: torch.Tensor, z_loss: torch.Tensor) -> None:
        """Add one layer's part of the two losses, without their coefficients."""
        self.sums[0] += balance.detach()
        self.sums[1] += z_loss.detach()

    def saw_mtp(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's part of the mean over the heads."""
        self.sums[2] += loss.detach()

    def metrics(self, layers_with_experts: int) -> dict[str, Metric]:
        """Return the step's metrics, the same on every rank. Collective over **all** ranks.

        A router's loss is the mean over the layers with experts, as Megatron reports it.
        """
        dist.all_reduce(self.sums)
        balance, z_loss, mtp = self.sums.tolist()
        found: dict[str, Metric] = {}
        if self.routed_tokens and layers_with_experts:
            of_layers = {"moe_aux_loss": balance} if self.sizes.moe_aux_loss_coeff else {}
            of_layers |= {"moe_z_loss": z_loss} if self.sizes.moe_z_loss_coeff else {}
            for name, value in of_layers.items():
                found[name] = Metric(value / layers_with_experts * self.routed_tokens, self.routed_tokens)
        if self.mtp_targets and self.mtp_targets[0]:
            found["mtp_loss"] = Metric(mtp * self.mtp_targets[0], self.mtp_targets[0])
        return found


def _counts(shard: TrainShard, sample: int, heads: int) -> list[float]:
    """Return the number of tokens of a sample, and of those that each head predicts."""
    batch = shard.batch
    total, mask = batch.total_lengths[sample], batch.loss_masks[sample]
    prompt = total - batch.response_lengths[sample]
    return [float(total)] + [float(mask[max(0, head + 2 - prompt) :].sum()) for head in range(heads)]
