"""The routers' auxiliary losses: in every layout the same for the same groups.

Let the step have N tokens; balance load over groups w of n_w tokens; route each token to k of E experts; let c_wi be
the number of tokens of w that expert i receives, and P_wi the sum of the router's probabilities for i over w::

    aux loss = sum_w n_w / N * E / (k n_w^2) * sum_i c_wi P_wi        z-loss = 1/N sum_t logsumexp(logits_t)^2

A group is a micro-batch with ``aux_loss`` (on all ranks that share it) and a sample with ``seq_aux_loss``. For one
group, the first is the loss of Switch Transformers (arXiv 2101.03961 eq. 4) as Megatron computes it, the second that of
ST-MoE (arXiv 2202.08906 eq. 5). Groups are weighted by their tokens. Every layer adds its own losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from miles.batch.collate import to_device
from miles.training.megatron.moe.auxiliary import AuxiliaryStep, attach
from miles.types.train_batch import MicroBatch

# 0.16 binds this name only if Transformer Engine is installed, and its router reads it either way.
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


@dataclass(frozen=True)
class RoutedTokens:
    """The M tokens of a micro-batch that this rank's routers see and the losses count, in G groups."""

    step: AuxiliaryStep
    micro: MicroBatch
    position: torch.Tensor  # int64 [M], into the tokens that the router receives
    group: torch.Tensor  # int64 [M]
    group_tokens: torch.Tensor  # fp32 [G], on all ranks together
    sequence_parallel: dist.ProcessGroup | None

    @classmethod
    def of(
        cls,
        micro: MicroBatch,
        step: AuxiliaryStep,
        shape: tuple[int, int],
        sequence_parallel: dist.ProcessGroup | None,
    ) -> RoutedTokens:
        """Locate the tokens of ``micro`` among those that this rank's routers receive.

        Args:
            micro: The micro-batch.
            step: The counts of its step.
            shape: [B, S] of its tokens with padding. A router receives them as [S, B].
            sequence_parallel: The ranks that hold equal parts of S, if any.
        """
        rows, length = shape
        totals = torch.tensor(micro.read_lengths if micro.response_lengths else [], device=micro.input_ids.device)
        position, sample = _members(micro, totals.long())
        position = position % length * rows + position // length
        if sequence_parallel is not None:
            share = rows * length // sequence_parallel.size()
            position = position - sequence_parallel.rank() * share
            mine = (position >= 0) & (position < share)
            position, sample = position[mine], sample[mine]
        match step.sizes.moe_router_load_balancing_type:
            case "seq_aux_loss":
                group, group_tokens = sample, totals.float()
            case "aux_loss" | "none":  # none: the balance has weight 0
                group, group_tokens = torch.zeros_like(sample), totals.sum()[None].float()
            case unknown:
                raise ValueError(f"--moe-router-load-balancing-type {unknown}: no such loss")
        # A micro-batch without samples also has a group: every rank takes part in the exchange.
        group_tokens = group_tokens.clamp_min(1) if len(group_tokens) else torch.ones(1, device=totals.device)
        return cls(step, micro, position, group, group_tokens, sequence_parallel)

    def sum_over_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        """Sum ``counts`` over all ranks that hold a part of the micro-batch. Collective."""
        counts = self.micro.context.sum(counts)
        if self.sequence_parallel is not None:
            dist.all_reduce(counts, group=self.sequence_parallel)
        return counts


def _members(micro: MicroBatch, totals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the position of each token of each sample on this rank, and its sample; both int64 [M], without padding.

    A token that several samples share occurs once for each of them.
    """
    samples = torch.arange(len(totals), device=totals.device)
    if micro.context.size == 1:
        where = micro.token_index[: sum(micro.read_lengths) if len(totals) else 0]
        return to_device(where.numpy(), totals.device), samples.repeat_interleave(totals)
    chunk = 2 * micro.context.size  # types/context_parallel.py: padded to a multiple; two chunks are on this rank
    local = (totals + chunk - 1) // chunk * 2
    sample = samples.repeat_interleave(local)
    inside = micro.position_ids[: len(sample)] < totals[sample]
    return torch.arange(len(sample), device=totals.device)[inside], sample[inside]


class BalancedRouter(TopKRouter):
    """Megatron's router, with these losses attached to its probabilities in place of Megatron's own."""

    tokens: RoutedTokens | None = None  # set by the layer before every pass

    def routing(self, logits: torch.Tensor, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return probabilities and routing map, each [S * B, E], of ``logits`` [S, B, E]."""
        probabilities, routing_map = super().routing(logits, *arguments, **named)
        if self.tokens is not None and torch.is_grad_enabled():  # under recomputation, only the second time
            loss = self._loss(logits.view(-1, logits.shape[-1]).float(), routing_map, self.tokens)
            probabilities = attach(probabilities, loss)
        return probabilities, routing_map

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """Count nothing: the biases of experts stay those of the checkpoint. Megatron's own would be compiled."""

    def _loss(self, logits: torch.Tensor, routing_map: torch.Tensor, tokens: RoutedTokens) -> torch.Tensor:
        """Return this rank's share of the layer's losses, scaled for its gradient. ``logits`` [S * B, E], fp32."""
        step, groups, experts = tokens.step, len(tokens.group_tokens), logits.shape[-1]
        assert step.routed_tokens or not len(tokens.position)
        count = max(step.routed_tokens, 1.0)

        def by_group(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(groups, experts).index_add(0, tokens.group, values[tokens.position])

        chosen = tokens.sum_over_ranks(by_group(routing_map.float()))
        weights = chosen / tokens.group_tokens[:, None] * (experts / (self.topk * count))
        balance = (by_group(logits.softmax(-1)) * weights).sum()
        z_loss = logits.logsumexp(-1).square()[tokens.position].sum() / count
        step.saw_router(balance, z_loss)
        sizes = step.sizes
        loss: torch.Tensor = sizes.moe_aux_loss_coeff * balance + sizes.moe_z_loss_coeff * z_loss
        return step.auxiliary_loss_factor * loss


def expert_biases(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the biases of the experts of each layer that has them, by name; fp32 [E], in the order of the layers.

    They are buffers: no gradient reaches them.
    """
    for name, module in model.named_modules():
        if isinstance(module, BalancedRouter) and module.expert_bias is not None:
            module._maintain_float32_expert_bias()  # a cast of the whole model reaches them
            yield f"{name}.expert_bias", module.expert_bias


class RoutedLayer(TransformerLayer):
    """A layer that passes its router the micro-batch's tokens and experts, also when recomputation runs it again."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the layer. ``packed_seq_params`` is passed by name."""
        if isinstance(router := getattr(self.mlp, "router", None), BalancedRouter):
            packed = named["packed_seq_params"]
            router.tokens = packed.routed
            router.router_replay = None if packed.experts is None else packed.experts.of_layer(self.layer_number - 1)
        return super().forward(*arguments, **named)
