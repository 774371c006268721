"""Losses that arise inside the model, beside the policy loss: the routers' (router.py) and MTP's (mtp.py).

They are not added to the loss that the schedule sees, which may stand on another pipeline stage: their gradient is
attached to an activation (``attach``). So what they are multiplied by is not what the schedule multiplies the loss by;
``MegatronLossScaling.attached`` has it, for either contract with Megatron. With that, each loss obeys the rule of
docs/loss-aggregation.md: a token's share is divided by a count of the whole step, and gradients are plain sums.

Megatron 0.16.1 divides by counts of a rank and a micro-batch instead, which is right for equal micro-batches with the
averaging contract only: with ``calculate_per_token_loss`` it scales router losses by the tokens that a rank routed and
divides by the tokens that carry loss (transformer/moe/router.py, ``attach_and_log_load_balancing_loss`` and
``apply_z_loss``), so that they come out (routed / loss tokens) times too strong, and TP * CP times too weak where ranks
share a sequence. Its own router losses are therefore left off, and the model has these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from miles.arguments.megatron.settings import MegatronArguments
from miles.metrics import Metric
from miles.train_batch import TrainShard
from miles.training.megatron.process_groups import Ranks


def attach(activation: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """``activation``, in whose backward pass ``loss``, a scalar, gets a gradient of 1."""
    return _Attached.apply(activation, loss)


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
    """The counts that the losses of one step are divided by, and what has been seen of them on this rank.

    ``routed_tokens`` counts every token of every sample that is trained on, prompts included and padding left out; a
    prompt that stands once for several samples counts once for each. ``mtp_targets[k]`` counts the loss tokens that
    head k can predict: those with k + 2 tokens before them. Both are of the whole step.
    """

    sizes: MegatronArguments
    routed_tokens: float
    mtp_targets: tuple[float, ...]
    attached: float  # what an attached loss is multiplied by (loss_contract.py)
    sums: torch.Tensor  # float64 [3]: this rank's part of the routers' two losses and of the MTP loss, without weights

    @classmethod
    def of(cls, shard: TrainShard, sizes: MegatronArguments, ranks: Ranks, device: torch.device) -> AuxiliaryStep:
        """Collective over the ranks of a pipeline stage that hold different tokens. ``attached`` is yet to be set."""
        mine = [0.0] * (1 + sizes.mtp_heads)
        for plan in shard.micro_batches:
            for i in plan.samples:
                whole = _counts(shard, i, sizes.mtp_heads)
                mine = [m + n / plan.context_parallel_size for m, n in zip(mine, whole, strict=True)]
        counts = torch.tensor(mine, dtype=torch.float64, device=device)
        dist.all_reduce(counts, group=ranks.dp)
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
        """Of the step, the same on every rank. Collective over **all** ranks, whichever has something to say.

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
    """Tokens of a sample, and how many of them each head has to predict."""
    batch = shard.batch
    total, mask = batch.total_lengths[sample], batch.loss_masks[sample]
    prompt = total - batch.response_lengths[sample]
    return [float(total)] + [float(mask[max(0, head + 2 - prompt) :].sum()) for head in range(heads)]
