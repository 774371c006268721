"""The routers' auxiliary losses: in every layout the same for the same groups.

Let the step have N tokens; balance load over groups w of n_w tokens; route each token to k of E experts; let c_wi be
the number of tokens of w that expert i receives, and P_wi the sum of the router's probabilities for i over w::

    aux loss = sum_w n_w / N * E / (k n_w^2) * sum_i c_wi P_wi        z-loss = 1/N sum_t logsumexp(logits_t)^2

A group is a micro-batch with ``aux_loss`` (on all ranks that share it) and a sample with ``seq_aux_loss``. For one
group, the first is the loss of Switch Transformers (arXiv 2101.03961 eq. 4) as Megatron computes it, the second the
loss of ST-MoE (arXiv 2202.08906 eq. 5). Groups are weighted by their tokens. Every layer adds its own losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.autograd.function import once_differentiable

from miles.batch.collate import to_device
from miles.config.megatron.settings import MegatronArguments
from miles.training.megatron.process_groups import Ranks
from miles.types.metrics import Metric
from miles.types.replay import UNKNOWN
from miles.types.train_batch import MicroBatch, TrainShard

# Losses that are computed inside the model, alongside the policy loss: the routers' and MTP's (packed_tokens.py).
#
# They are not added to the loss that the schedule sees, because it may be on another pipeline stage. Instead their
# gradient is attached to an activation (``attach``), so the schedule's factor does not apply to them;
# ``LossScaling.auxiliary_loss_factor`` does, for either contract with Megatron. With it, each loss obeys the
# rule of docs/loss-aggregation.md: a token's share is divided by a count of the whole step, and gradients are sums.
#
# Megatron 0.16.1 divides by counts of a rank and a micro-batch instead, which is right only for equal micro-batches
# under the averaging contract. With ``calculate_per_token_loss`` it scales router losses by the tokens that a rank
# routed and divides by the loss tokens (transformer/moe/router.py, ``attach_and_log_load_balancing_loss`` and
# ``apply_z_loss``), so they are (routed / loss tokens) times too strong, and TP * CP times too weak if ranks share a
# sequence. Megatron's router losses are therefore off, and the model has these.


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
    auxiliary_loss_factor: float  # runner.py computes it
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
        metrics: dict[str, Metric] = {}
        if self.routed_tokens and layers_with_experts:
            of_layers = {"moe_aux_loss": balance} if self.sizes.moe_aux_loss_coeff else {}
            of_layers |= {"moe_z_loss": z_loss} if self.sizes.moe_z_loss_coeff else {}
            for name, value in of_layers.items():
                metrics[name] = Metric(value / layers_with_experts * self.routed_tokens, self.routed_tokens)
        if self.mtp_targets and self.mtp_targets[0]:
            metrics["mtp_loss"] = Metric(mtp * self.mtp_targets[0], self.mtp_targets[0])
        return metrics


def _counts(shard: TrainShard, sample: int, heads: int) -> list[float]:
    """Return the number of tokens of a sample, and of those that each head predicts."""
    batch = shard.batch
    total, mask = batch.total_lengths[sample], batch.loss_masks[sample]
    prompt = total - batch.response_lengths[sample]
    return [float(total)] + [float(mask[max(0, head + 2 - prompt) :].sum()) for head in range(heads)]


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
        cls, micro: MicroBatch, step: AuxiliaryStep, shape: tuple[int, int], sequence_parallel: dist.ProcessGroup | None
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
    chunk = 2 * micro.context.size  # types/parallel.py: padded to a multiple; two chunks are on this rank
    local = (totals + chunk - 1) // chunk * 2
    sample = samples.repeat_interleave(local)
    inside = micro.position_ids[: len(sample)] < totals[sample]
    return torch.arange(len(sample), device=totals.device)[inside], sample[inside]


class BalancedRouter(TopKRouter):
    """Megatron's router, with these losses attached to its probabilities instead of Megatron's own."""

    tokens: RoutedTokens | None = None  # set by the layer before every pass

    def routing(self, logits: torch.Tensor, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return probabilities and routing map, each [S * B, E], of ``logits`` [S, B, E]."""
        probabilities, routing_map = super().routing(logits, *arguments, **named)
        if self.tokens is not None and torch.is_grad_enabled():  # under recomputation, only the second time
            loss = self._loss(logits.view(-1, logits.shape[-1]).float(), routing_map, self.tokens)
            probabilities = attach(probabilities, loss)
        return probabilities, routing_map

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """Count nothing: the biases of experts stay as in the checkpoint. Megatron's own would be compiled."""

    def _loss(self, logits: torch.Tensor, routing_map: torch.Tensor, tokens: RoutedTokens) -> torch.Tensor:
        """Return this rank's share of the layer's losses, scaled for its gradient. ``logits`` [S * B, E], fp32."""
        step = tokens.step
        groups = len(tokens.group_tokens)
        experts = logits.shape[-1]
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


# Give the routers of a pass the experts that were chosen before, through Megatron's hook ``router_replay``.
#
# ``topk_routing_with_score_function`` (megatron-core 0.16.1 ``transformer/moe/moe_utils.py``) asks ``router_replay``
# for the experts and computes their weights from the router's logits. Megatron's own ``RouterReplay`` keeps its choices
# in a global list. In a pipeline, passes over several micro-batches alternate, so here each micro-batch carries its
# choices.


@dataclass(frozen=True)
class LayerExperts:
    """The experts of one layer: replayed, recorded as they are chosen, or neither.

    Attributes:
        replayed: int16 [tokens of the router, k], ``UNKNOWN`` for the router's own choice.
        keep: Receives the chosen experts, int64 [tokens of the router, k].
    """

    replayed: torch.Tensor | None
    keep: Callable[[torch.Tensor], None] | None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores [tokens, k] of the experts, and the experts; called by Megatron's router."""
        values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.replayed is not None:
            chosen = self.replayed.to(experts)
            experts = torch.where(chosen == UNKNOWN, experts, chosen)
            values = scores.gather(1, experts)
        if self.keep is not None:
            self.keep(experts.detach())
        return values, experts


@dataclass(frozen=True)
class MicroBatchExperts:
    """The experts of a micro-batch, ordered as this rank's routers see its tokens.

    Attributes:
        replayed: int16 [tokens, layers, k], of all decoder layers.
        choices: By layer, int16 [tokens, k]: of this stage, from the first pass on.
        keeps: Whether this pass is the first.
    """

    replayed: torch.Tensor | None = None
    choices: dict[int, torch.Tensor] | None = None
    keeps: bool = False

    @classmethod
    def of(
        cls, experts: torch.Tensor, shape: tuple[int, int], padding: int, sequence_parallel: dist.ProcessGroup | None
    ) -> MicroBatchExperts:
        """Arrange ``experts``, [T, layers, k] in the order of ``MicroBatch``, for routers that receive [S, B].

        Args:
            experts: The experts.
            shape: B and S, with padding.
            padding: How many of these tokens belong to no sample; they are the last.
            sequence_parallel: The ranks that hold equal parts of S, if any.
        """
        padded = torch.nn.functional.pad(experts, (0, 0, 0, 0, 0, padding), value=UNKNOWN)
        ordered = padded.view(*shape, *experts.shape[1:]).transpose(0, 1).flatten(0, 1)
        if sequence_parallel is not None:
            ordered = ordered.chunk(sequence_parallel.size())[sequence_parallel.rank()]
        return cls(replayed=ordered)

    def of_layer(self, layer: int) -> LayerExperts:
        """Return the experts of the decoder layer ``layer``, counted from 0."""
        if self.replayed is not None:
            return LayerExperts(self.replayed[:, layer], None)
        assert self.choices is not None
        by_layer = self.choices

        def keep(experts: torch.Tensor) -> None:
            by_layer[layer] = experts.to(torch.int16).cpu()

        if self.keeps:
            return LayerExperts(None, keep)
        chosen = by_layer.get(layer)
        return LayerExperts(None, None) if chosen is None else LayerExperts(chosen, None)
