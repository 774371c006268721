"""One step's gradient through Megatron's schedule, and the step's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from miles.arguments.megatron.settings import MegatronArguments
from miles.batching.collate import collate, split_by_sample
from miles.metrics import Metric
from miles.objective.aggregation import is_per_token
from miles.objective.chosen import build_objective
from miles.objective.output import LossOutput, add_metrics, reported
from miles.objective.settings import LossArguments
from miles.objective.value_loss import value_loss_function
from miles.train_batch import MicroBatch, MicroBatchPlan, TrainShard
from miles.training.megatron.loss_mass import take_mass
from miles.training.megatron.loss_scaling import AveragingScaling, MegatronLossScaling, PerTokenScaling, ScheduleLoss
from miles.training.megatron.model.mtp import NextTokens
from miles.training.megatron.model.packed_tokens import PackedTokens
from miles.training.megatron.model.policy_model import PolicyModel
from miles.training.megatron.model.value_model import ValueModel
from miles.training.megatron.moe.auxiliary import AuxiliaryStep
from miles.training.megatron.moe.router import RoutedTokens
from miles.training.megatron.process_groups import Ranks


def forward_backward(
    model: DistributedDataParallel,
    shard: TrainShard,
    loss: LossArguments,
    sizes: MegatronArguments,
    ranks: Ranks,
    device: torch.device,
) -> dict[str, Metric]:
    """Backward through every micro-batch. The metrics are the step's, the same on every rank.

    Which loss it is follows from the model: the critic's is the value loss, and has no canary.
    """
    totals: dict[str, torch.Tensor] = {}
    scored_tokens = 0
    if shard.score_only:
        with torch.no_grad():
            scored = Pass(model.module, shard, shard.score_only, ranks, device)
            for metrics, tokens in scored.run(partial(_metrics_of, loss), forward_only=True):
                add_metrics(totals, metrics)
                scored_tokens += tokens
    contract: MegatronLossScaling = AveragingScaling(len(shard.micro_batches), ranks.dp.size())
    if model.config.calculate_per_token_loss:
        contract = PerTokenScaling(shard.batch.num_loss_tokens, scored_tokens)
    auxiliary: AuxiliaryStep | None = None
    if sizes.has_auxiliary_loss:
        assert not shard.score_only, "an auxiliary loss gives every sample a gradient"
        auxiliary = replace(AuxiliaryStep.of(shard, sizes, ranks, device), attached=contract.attached)
    trained = Pass(model.module, shard, shard.micro_batches, ranks, device, auxiliary)
    for metrics in trained.run(partial(_share_of_loss, loss, contract), model=model):
        add_metrics(totals, metrics)
    found = _reduce(totals, take_mass(model, ranks), shard, loss, ranks, device)
    inside = auxiliary.metrics(layers_with_experts(model.config)) if auxiliary is not None else {}
    return found | (inside if shard.batch.num_loss_tokens else {})


class Pass:
    """Micro-batches through the pipeline: collated one at a time, each stage's output where its loss function is."""

    def __init__(
        self,
        policy: PolicyModel,
        shard: TrainShard,
        micro_batches: Sequence[MicroBatchPlan],
        ranks: Ranks,
        device: torch.device,
        auxiliary: AuxiliaryStep | None = None,
    ) -> None:
        self.policy = policy
        self.auxiliary = auxiliary
        self.shard = shard
        self.micro_batches = micro_batches
        self.ranks = ranks
        self.device = device

    def run(self, loss_function: Any, model: Any = None, forward_only: bool = False) -> list[Any]:
        """What ``loss_function(policy, micro, hidden)`` has put into its last place, one a micro-batch.

        Empty on all pipeline stages but the last. ``model`` is the policy in its data-parallel wrapper, where
        gradients are wanted.
        """

        def forward_step(
            data: Iterator[tuple[MicroBatch, PackedTokens]], stage: torch.nn.Module
        ) -> tuple[torch.Tensor, Any]:
            micro, tokens = next(data)
            assert tokens.input_ids is not None and tokens.position_ids is not None
            hidden = stage(tokens.input_ids, tokens.position_ids, None, packed_seq_params=tokens)
            return hidden, partial(loss_function, self.policy, micro)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=self._collated(),
            model=[self.policy if model is None else model],
            num_microbatches=len(self.micro_batches),
            seq_length=1,  # not read: variable_seq_lengths
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _collated(self) -> Iterator[tuple[MicroBatch, PackedTokens]]:
        heads = self.auxiliary.sizes.mtp_heads if self.auxiliary is not None else 0
        for plan in self.micro_batches:
            context = self.ranks.context.of(plan.context_parallel_size)
            micro = collate(
                self.shard.batch,
                plan.samples,
                self.device,
                context,
                # The tokens after the end of a prompt, which heads are given, differ from sample to sample.
                share_prompts=not heads,
                row_multiple=self._multiple() if plan.padded else None,
            )
            tokens = PackedTokens.of(micro, self._multiple())
            if self.auxiliary is not None:
                self._add_auxiliary(tokens, micro, self.auxiliary)
            if heads:
                tokens.ahead = NextTokens.of(self.shard.batch, plan.samples, micro, heads, tokens.shape)
            yield micro, tokens

    def _add_auxiliary(self, tokens: PackedTokens, micro: MicroBatch, auxiliary: AuxiliaryStep) -> None:
        tokens.auxiliary = auxiliary
        if auxiliary.sizes.has_router_loss:
            shared = self.ranks.tp if self.policy.config.sequence_parallel else None
            tokens.routed = RoutedTokens.of(micro, auxiliary, tokens.shape, shared)

    def _multiple(self) -> int:
        config = self.policy.config
        return config.tensor_model_parallel_size if config.sequence_parallel else 1


def layers_with_experts(config: TransformerConfig) -> int:
    """Of the whole model, heads of multi-token prediction among them."""
    if not config.num_moe_experts:
        return 0
    assert isinstance(config.moe_layer_freq, list)
    return sum(config.moe_layer_freq) + (config.mtp_num_layers or 0) * config.moe_layer_freq[-1]


def _share_of_loss(
    loss: LossArguments, contract: MegatronLossScaling, policy: PolicyModel, micro: MicroBatch, hidden: torch.Tensor
) -> ScheduleLoss:
    return contract(_loss_of(loss, policy, micro, hidden), micro)


def _metrics_of(
    loss: LossArguments, policy: PolicyModel, micro: MicroBatch, hidden: torch.Tensor
) -> tuple[torch.Tensor, tuple[dict[str, torch.Tensor], int]]:
    """The metrics of a micro-batch that is not trained on, and its loss tokens on this rank."""
    return hidden.new_zeros(()), (_loss_of(loss, policy, micro, hidden).metrics, int(micro.loss_mask.sum()))


def _loss_of(loss: LossArguments, policy: PolicyModel, micro: MicroBatch, hidden: torch.Tensor) -> LossOutput:
    if isinstance(policy, ValueModel):
        return value_loss_function(loss, micro, policy.values(hidden, micro))
    objective = build_objective(loss)
    log_probs, entropy = policy.score(hidden, micro, with_entropy=objective.needs.entropy)
    # In every step, watched or not: overlapped reductions wait for the gradient of every parameter.
    canary = None if policy.canary is None else policy.canary.sum()
    return objective.language_model_loss(micro, log_probs, entropy, canary)


def log_probs_of(policy: PolicyModel, shard: TrainShard, ranks: Ranks, device: torch.device) -> list[np.ndarray]:
    """Log-probs of each sample's response, float32 [response], without a graph; on every rank."""
    return _by_sample(
        policy, lambda hidden, micro: policy.score(hidden, micro, with_entropy=False)[0], shard, ranks, device
    )


def values_of(model: ValueModel, shard: TrainShard, ranks: Ranks, device: torch.device) -> list[np.ndarray]:
    """Values of each sample's response, float32 [response], without a graph; on every rank."""
    return _by_sample(model, model.values, shard, ranks, device)


def _by_sample(
    policy: PolicyModel,
    score: Callable[[torch.Tensor, MicroBatch], torch.Tensor],
    shard: TrainShard,
    ranks: Ranks,
    device: torch.device,
) -> list[np.ndarray]:
    micro_batches = (*shard.micro_batches, *shard.score_only)

    def scores(_policy: PolicyModel, micro: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return hidden.new_zeros(()), (micro, score(hidden, micro))

    with torch.no_grad():
        found = Pass(policy, shard, micro_batches, ranks, device).run(scores, forward_only=True)
    by_sample: dict[int, np.ndarray] = {}
    for plan, (micro, scored) in zip(micro_batches, found, strict=ranks.is_last_stage):
        by_sample |= zip(plan.samples, split_by_sample(scored, micro), strict=True)
    return _from_last_stage(by_sample, shard, ranks, device)


def _from_last_stage(
    by_sample: dict[int, np.ndarray], shard: TrainShard, ranks: Ranks, device: torch.device
) -> list[np.ndarray]:
    """One array a sample in the shard's order, sent through the pipeline by the stage that has them."""
    lengths = shard.batch.response_lengths
    if ranks.pp.size() == 1:
        return [by_sample[i] for i in range(len(lengths))]
    flat = torch.zeros(sum(lengths), device=device)
    if ranks.is_last_stage and lengths:
        flat.copy_(torch.from_numpy(np.concatenate([by_sample[i] for i in range(len(lengths))])))
    dist.broadcast(flat, ranks.last_stage, group=ranks.pp)
    return [part.numpy() for part in flat.cpu().split(list(lengths))]


def _reduce(
    totals: dict[str, torch.Tensor],
    mass: float,
    shard: TrainShard,
    loss: LossArguments,
    ranks: Ranks,
    device: torch.device,
) -> dict[str, Metric]:
    """Sum over the ranks of the last stage, which tell the others; what the sums are worth is told in ``reported``."""
    names = [sorted(totals)]
    dist.broadcast_object_list(names, ranks.last_stage, group=ranks.pp)
    packed = torch.zeros(len(names[0]) + 1, device=device)
    if ranks.is_last_stage:
        packed = torch.stack([*(totals[name].detach().float() for name in names[0]), packed.new_tensor(mass)])
        dist.all_reduce(packed, group=ranks.dp)
    dist.broadcast(packed, ranks.last_stage, group=ranks.pp)
    *sums, loss_mass = packed.tolist()
    metrics = reported(dict(zip(names[0], sums, strict=True)), shard.batch, is_per_token(loss))
    watched = shard.expected_loss_mass is not None
    return metrics | {"loss_mass": Metric(loss_mass)} if watched else metrics
