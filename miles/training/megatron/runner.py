"""Run micro-batches through Megatron's schedule, which owns the loop over them.

Only the last pipeline stage has a loss: results are there, and empty lists on the other stages.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic

import megatron.core.optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from miles.base.profiling import named_by_timers, span
from miles.batch.collate import collate
from miles.config.megatron.settings import MegatronArguments
from miles.config.optimizer import OptimizerArguments
from miles.objective.output import LossOutput
from miles.training.backend import LossFunction, Result, Scorer, StepSums
from miles.training.megatron.model.packed_tokens import NextTokens, PackedTokens
from miles.training.megatron.moe import AuxiliaryStep, MicroBatchExperts, RoutedTokens
from miles.training.megatron.policy_model import PolicyModel
from miles.training.megatron.process_groups import Ranks
from miles.training.megatron.versions import average_of_ddp, average_of_schedule
from miles.training.optimizer import ScheduledOptimizer
from miles.types.train_batch import MicroBatch, MicroBatchPlan, TrainShard

# Megatron's AdamW under the schedule of training/optimizer.py.

# Megatron takes Adam from Transformer Engine or Apex if they are installed. Theirs keep the number of steps in another
# field, and need a GPU: every run has torch's, whose state checkpoints are made of (``optimizer_state``).
megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = True
megatron.core.optimizer.Adam = torch.optim.AdamW  # of what --optimizer-cpu-offload leaves on the GPU


class MegatronOptimizer(ScheduledOptimizer):
    """fp32 AdamW over the gradient buffers of the model's chunks. Weight decay applies to matrices only.

    With ``config.optimizer_cpu_offload`` its state, and the fp32 weights, are in host memory and are updated there
    (Megatron's ``HybridDeviceOptimizer``).
    """

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        config: OptimizerConfig,
        settings: OptimizerArguments,
        total_steps: int,
        rate_flag: str = "--lr",
    ) -> None:
        super().__init__(settings, total_steps, rate_flag)
        # The overrides exempt norms and biases from weight decay; Megatron's scheduler, which would apply them, is not
        # used: the schedule is one for both backends.
        overrides = get_standard_config_overrides(config)
        # Of fp32 weights (of the canary, and of adapters) the distributed optimizer takes views, which torch's Adam in
        # host memory accepts only without a graph.
        with torch.no_grad() if config.optimizer_cpu_offload else nullcontext():
            self.adam = get_megatron_optimizer(config, [*models], overrides, use_gloo_process_groups=False)
        for group in self.adam.param_groups:
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
            group["fused"] = True  # torch's AdamW loops over tensors by default
        self._models = models

    def _gradient_norm(self) -> float:
        self.adam.prepare_grads()
        return float(self.adam.get_grad_norm())

    def _clip_and_update(self, norm: float) -> None:
        updated, _norm, _zeros = self.adam.step()  # clips on its own
        assert updated, "only a loss scaler, which fp16 has, refuses an update"

    def _clear(self) -> None:
        for model in self._models:
            model.zero_grad_buffer()
        self.adam.zero_grad()


# A rank's state, which waits in host memory while engines use its GPU (``--offload-train``).
#
# Megatron's parameters, gradients and fp32 copies are views of a few large buffers, and several objects have views of
# the same buffer. So storages are emptied and filled again: every view stays unchanged, on CPU as on a GPU.


class HostCopies:
    """Host copies of what was taken off a device; empty while nothing is."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._zeros: list[tuple[torch.UntypedStorage, int]] = []

    def take(self, tensors: Iterable[torch.Tensor], zeros: Iterable[torch.Tensor], device: torch.device) -> None:
        """Copy the storages of ``tensors`` and empty them.

        Args:
            tensors: Those on other devices stay unchanged. Several may share a storage.
            zeros: Those whose storages hold zeros, which are not copied: one pass over them checks it.
            device: The device whose memory is freed.
        """
        assert not self._copies and not self._zeros, "onload() comes before the next offload()"
        of_zeros = _storages(zeros, device)
        assert not any(_bytes_of(storage).any() for storage in of_zeros), "gradients are not 0 between two steps"
        for storage in of_zeros:
            self._zeros.append((storage, storage.nbytes()))
            storage.resize_(0)
        for storage in _storages(tensors, device):
            self._copies.append((storage, _bytes_of(storage).to("cpu", copy=True)))
            storage.resize_(0)

    def give_back(self) -> None:
        """Fill the storages again."""
        for storage, copy in self._copies:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy)
        for storage, size in self._zeros:
            storage.resize_(size)
            _bytes_of(storage).zero_()
        self._copies, self._zeros = [], []


def gradients(models: Sequence[DistributedDataParallel]) -> Iterator[torch.Tensor]:
    """Yield the gradients of ``models``, which are 0 between steps."""
    for model in models:
        for buffer in model.buffers + model.expert_parallel_buffers:
            yield buffer.grad_data


def model_state(chunks: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers. With the distributed optimizer, parameters are views of the gathered buffers."""
    for chunk in chunks:
        yield from chunk.parameters()
        yield from chunk.buffers()


def optimizer_state(adam: Any) -> Iterator[torch.Tensor]:
    """Yield fp32 weights and moments of Megatron's optimizer ``adam``."""
    for part in adam.chained_optimizers if isinstance(adam, ChainedOptimizer) else [adam]:
        if part.optimizer is not None:  # None: the rank has no such parameter
            yield from _state(part.optimizer)


def free_buffers_of_layers() -> None:
    """Drop the buffers into which sequence-parallel layers gather; they make new ones."""
    get_global_memory_buffer().buffer.clear()


def _state(adam: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in adam.param_groups:
        for parameter in group["params"]:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    for state in adam.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    if isinstance(adam, HybridDeviceOptimizer):
        for part in adam.sub_optimizers:
            yield from _state(part)


def _storages(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """Return the storages on ``device``, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type]
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# Return a micro-batch's share of the loss to Megatron's schedule, so that gradients are plain sums.
#
# The loss functions return shares whose sum over micro-batches and ranks is the step's loss
# (docs/loss-aggregation.md). Megatron averages on the way, in one of two ways, and only this file cancels it.
# versions.py has the lines of the framework that are cancelled.


Metrics = dict[str, torch.Tensor]
ScheduleLoss = tuple[torch.Tensor | Metrics, ...]  # the results of the schedule's loss function


@dataclass
class LossScaling(ABC):
    """One contract with the schedule. Made for one pass over a step; called once per micro-batch, in order.

    Attributes:
        auxiliary_loss_factor: The factor of a loss that does not pass through the schedule (moe.py).
    """

    auxiliary_loss_factor: float

    @abstractmethod
    def __call__(self, output: LossOutput, micro: MicroBatch) -> ScheduleLoss:
        """Return the tuple of this contract."""


@dataclass
class AveragingScaling(LossScaling):
    """``calculate_per_token_loss`` off: the two-tuple ``(loss, metrics)``.

    The schedule and the data-parallel reduction multiply by constants that are known beforehand; the loss is divided by
    them. Losses inside the model pass through the second alone.
    """

    average: float

    def __call__(self, output: LossOutput, micro: MicroBatch) -> ScheduleLoss:
        """Return the loss before both averages."""
        return output.loss / self.average, output.metrics


@dataclass
class PerTokenScaling(LossScaling):
    """``calculate_per_token_loss`` on: the three-tuple ``(loss, tokens, metrics)``.

    Megatron divides gradients of every loss by the tokens that all ranks and micro-batches report
    (``finalize_model_grads``). They add up to T, the loss tokens of the step, so losses are multiplied by T: under
    ``token_mean``, whose shares hold 1/T, that is the plain sum of token losses. ``scored_tokens`` counts the tokens of
    samples that are not trained on; they are reported once, with the first micro-batch.
    """

    num_loss_tokens: int
    scored_tokens: int

    def __call__(self, output: LossOutput, micro: MicroBatch) -> ScheduleLoss:
        """Return the loss times T, with the loss tokens of this rank."""
        tokens = micro.loss_mask.sum().int() + self.scored_tokens
        self.scored_tokens = 0
        return output.loss * self.num_loss_tokens, tokens, output.metrics


def scaling_of(shard: TrainShard, per_token: bool, ranks: Ranks, micro_batches: int) -> LossScaling:
    """Return the contract that ``calculate_per_token_loss`` selects, for one pass over ``shard``.

    ``micro_batches`` are those that the schedule runs, empty ones among them.
    """
    if not per_token:
        of_ddp = average_of_ddp(ranks.token_group.size())
        return AveragingScaling(1.0 / of_ddp, average_of_schedule(micro_batches) * of_ddp)
    tokens, masks = shard.batch.num_loss_tokens, shard.batch.loss_masks
    # Of ranks that share a sample, the first counts its tokens.
    firsts = (plan for plan in shard.score_only if ranks.context.of(plan.context_parallel_size).rank == 0)
    return PerTokenScaling(float(tokens), tokens, sum(int(masks[i].sum()) for plan in firsts for i in plan.samples))


class MegatronModel(Generic[Scorer]):
    """``ScoredModel`` (training/backend.py) for one rank: ``stage`` is its part of the model."""

    def __init__(self, stage: PolicyModel, ranks: Ranks, device: torch.device) -> None:
        self.stage = stage
        self.ranks = ranks
        self.device = device
        self.replays_experts = False  # --use-rollout-routing-replay
        self.records_experts = False  # --use-routing-replay
        self.reads_last = False  # True if it trains on losses of its routers, which are means over all tokens
        self._first_choices: dict[int, dict[int, torch.Tensor]] = {}  # by plan, the experts of its first pass

    def forward(
        self, shard: TrainShard, plans: Sequence[MicroBatchPlan], function: Callable[[MicroBatch, Scorer], Result]
    ) -> list[Result]:
        """Run ``plans`` without a graph; returns what ``function`` makes of each micro-batch."""
        if not plans:
            return []

        def result_of(micro: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, Result]:
            return hidden.new_zeros(()), function(micro, self.stage.scorer(hidden, micro))

        with torch.no_grad():
            return self._run(self.stage.chunks, shard, plans, result_of, forward_only=True)

    def _run(
        self,
        chunks: Sequence[torch.nn.Module],
        shard: TrainShard,
        plans: Sequence[MicroBatchPlan],
        loss_function: Callable[[MicroBatch, torch.Tensor], tuple[Any, ...]],
        auxiliary: AuxiliaryStep | None = None,
        forward_only: bool = False,
    ) -> list[Any]:
        """Run ``plans`` through the pipeline; returns the last entry of what ``loss_function`` gives for each.

        ``chunks`` are the chunks of ``stage``, in data-parallel wrappers where gradients are wanted. ``loss_function``
        gets the hidden states of the last stage.
        """
        padded = self._padded(plans)

        def forward_step(
            data: Iterator[tuple[MicroBatch, PackedTokens]], stage: torch.nn.Module
        ) -> tuple[torch.Tensor, Any]:
            micro, tokens = next(data)
            assert tokens.input_ids is not None and tokens.position_ids is not None
            hidden = stage(tokens.input_ids, tokens.position_ids, None, packed_seq_params=tokens)
            return hidden, partial(loss_function, micro)

        # Of the chunks of an interleaved pipeline, each sees a micro-batch once, and keeps the experts of its layers.
        known_plans = set(self._first_choices)
        data = [self._collated(shard, padded, auxiliary, known_plans) for _ in chunks]
        with named_by_timers(self.stage.config):
            results: list[Any] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=data if len(chunks) > 1 else data[0],
                model=[*chunks],
                num_microbatches=len(padded),
                seq_length=1,  # not read: variable_seq_lengths
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return results[: len(plans)]

    def _padded(self, plans: Sequence[MicroBatchPlan]) -> list[MicroBatchPlan]:
        """Return ``plans``, with empty ones added if an interleaved schedule needs a multiple of the stages."""
        missing = -len(plans) % self.ranks.pp.size() if len(self.stage.chunks) > 1 else 0
        return [*plans, *(replace(plans[-1], samples=()) for _ in range(missing))]

    def _collated(
        self,
        shard: TrainShard,
        plans: Sequence[MicroBatchPlan],
        auxiliary: AuxiliaryStep | None,
        known_plans: Collection[int],
    ) -> Iterator[tuple[MicroBatch, PackedTokens]]:
        """Yield micro-batch by micro-batch, when the schedule asks for it."""
        config = self.stage.config
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        heads = auxiliary.sizes.mtp_heads if auxiliary is not None else 0
        for plan in plans:
            with span("collate"):
                micro = collate(
                    shard.batch,
                    plan.samples,
                    self.device,
                    self.ranks.context.of(plan.context_parallel_size),
                    # The tokens after the end of a prompt, which heads are given, differ from sample to sample.
                    share_prefixes=not heads,
                    row_multiple=multiple if plan.padded else None,
                    reads_last=self.reads_last,
                )
            tokens = PackedTokens.of(micro, multiple)
            tokens.experts = self._experts(plan, micro, tokens, id(plan) in known_plans)
            if auxiliary is not None:
                tokens.auxiliary = auxiliary
                if auxiliary.sizes.has_router_loss:
                    shared = self.ranks.tp if config.sequence_parallel else None
                    tokens.routed = RoutedTokens.of(micro, auxiliary, tokens.shape, shared)
            if heads:
                tokens.ahead = NextTokens.of(shard.batch, plan.samples, micro, heads, tokens.shape)
            yield micro, tokens

    def _experts(
        self, plan: MicroBatchPlan, micro: MicroBatch, tokens: PackedTokens, is_known: bool
    ) -> MicroBatchExperts | None:
        """Return the experts for the micro-batch's routers, or an object that keeps their choice; None for neither.

        ``is_known`` states that an earlier pass has kept them. A micro-batch has the same layout in every pass. Its
        experts are removed when its plan is no longer used.
        """
        if self.replays_experts and micro.experts is not None:
            shared = self.ranks.tp if self.stage.config.sequence_parallel else None
            return MicroBatchExperts.of(micro.experts, tokens.shape, tokens.padding, shared)
        if not self.records_experts:
            return None
        if is_known:
            return MicroBatchExperts(choices=self._first_choices[id(plan)])
        if torch.is_grad_enabled():  # nothing was scored before: this pass is the only one
            return None
        if id(plan) not in self._first_choices:
            self._first_choices[id(plan)] = {}
            weakref.finalize(plan, self._first_choices.pop, id(plan), None)
        return MicroBatchExperts(choices=self._first_choices[id(plan)], keeps=True)


class MegatronBaseModel(MegatronModel[Scorer]):
    """The model under an adapter, which is left out: as a reference it needs no separate weights."""

    def forward(
        self, shard: TrainShard, plans: Sequence[MicroBatchPlan], function: Callable[[MicroBatch, Scorer], Result]
    ) -> list[Result]:
        """Run ``plans`` without the adapter."""
        assert self.stage.adapter is not None
        with self.stage.adapter.off():
            return super().forward(shard, plans, function)


class MegatronTrainedModel(MegatronModel[Scorer]):
    """``TrainedModel`` for one rank: ``distributed`` are the chunks of ``stage`` with gradient buffers."""

    def __init__(
        self,
        distributed: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        sizes: MegatronArguments,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        super().__init__(distributed[-1].module, ranks, device)
        self.distributed = distributed
        self.optimizer = optimizer
        self.sizes = sizes
        self.reads_last = sizes.has_router_loss

    def forward_backward(self, shard: TrainShard, loss_function: LossFunction[Scorer]) -> StepSums:
        """Score the samples that are not trained on, then run backward through every micro-batch."""
        scored = self.forward(shard, shard.score_only, lambda micro, scorer: loss_function(micro, scorer).metrics)
        micro_batches = max(1, len(self._padded(shard.micro_batches)))
        scaling = scaling_of(shard, self.stage.config.calculate_per_token_loss, self.ranks, micro_batches)
        auxiliary: AuxiliaryStep | None = None
        if self.sizes.has_auxiliary_loss:
            assert not shard.score_only, "an auxiliary loss gives every sample a gradient"
            auxiliary = AuxiliaryStep.of(shard, self.sizes, self.ranks, self.device)
            auxiliary = replace(auxiliary, auxiliary_loss_factor=scaling.auxiliary_loss_factor)

        def scaled(micro: MicroBatch, hidden: torch.Tensor) -> ScheduleLoss:
            return scaling(loss_function(micro, self.stage.scorer(hidden, micro)), micro)

        adapter = self.stage.adapter
        with nullcontext() if adapter is None else adapter.dropping():
            trained = self._run(self.distributed, shard, shard.micro_batches, scaled, auxiliary)
        inside = {} if auxiliary is None else auxiliary.metrics(layers_with_experts(self.stage.config))
        return StepSums([*trained, *scored], inside if shard.batch.num_loss_tokens else {})

    def take_loss_mass(self) -> torch.Tensor:
        """Return the canary's gradient on the one data-parallel rank of the last stage that has it whole, 0 elsewhere.

        It is cleared, so that neither norm nor optimizer sees it. Under a distributed optimizer the gradient buffer is
        reduced in equal parts, one per rank; the other ranks' copies of a part are not reduced.
        """
        canary: Any = self.stage.canary  # Megatron's gradient buffers add main_grad to parameters
        nothing = torch.zeros((), device=self.device)
        if canary is None:
            return nothing
        gradient: torch.Tensor = canary.main_grad
        mass = gradient.detach().sum()
        gradient.zero_()
        return mass if self.ranks.token_group.rank() == self._owner(canary) else nothing

    def _owner(self, canary: Any) -> int:
        *_, distributed = self.distributed
        if not distributed.ddp_config.use_distributed_optimizer:
            return 0
        for buffer in distributed.buffers:
            for bucket in buffer.buckets:
                if canary in bucket.params:
                    # Not bucket.param_to_index, which leaves out the padding between parameters.
                    start = canary.main_grad.storage_offset() - bucket.grad_data.storage_offset()
                    return int(start // (bucket.grad_data.numel() // self.ranks.token_group.size()))
        raise AssertionError("every parameter has a bucket")


def layers_with_experts(config: TransformerConfig) -> int:
    """Count the layers with experts of the whole model, with heads of multi-token prediction."""
    if not config.num_moe_experts:
        return 0
    has_experts: list[int] = config.moe_layer_freq
    return sum(has_experts) + (config.mtp_num_layers or 0) * has_experts[-1]
