"""The Megatron backend without weights (training/backend.py).

Three things that a run learns from values are given here: the shapes that pipeline stages send each other, the experts
of each token, and the sums that the stages exchange.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import clip_grads
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from miles.base.attributes import set_within
from miles.base.flags import refuse
from miles.batch.collate import collate
from miles.config.settings import Settings
from miles.training.backend import LeaveOut, RehearsedBackend
from miles.training.megatron.backend import MegatronBackend, MegatronModelBuilder
from miles.training.megatron.hf_files import HuggingFaceWeights
from miles.training.megatron.layers import PackedRotaryEmbedding
from miles.training.megatron.model.packed_tokens import PackedTokens
from miles.training.megatron.moe import BalancedRouter
from miles.training.megatron.policy_model import PolicyModel
from miles.training.megatron.runner import MegatronTrainedModel, gradients, model_state
from miles.types.train_batch import TrainShard


class _NoWeights(HuggingFaceWeights):
    """A checkpoint that is not there."""

    def __init__(self, path: str) -> None:
        self.path = path

    def generation_config(self) -> str | None:
        """Return None."""
        return None


class _BuilderWithoutWeights(MegatronModelBuilder):
    """Builds models whose tensors are fake."""

    def _weights_at(self, flag: str, path: str) -> HuggingFaceWeights:
        return _NoWeights(path)

    def _fill(self, policy: PolicyModel, weights: HuggingFaceWeights) -> None:
        """Read nothing."""

    def _add_adapter(self, policy: PolicyModel) -> None:
        """Add it, and neither draw it nor ask the other stages for theirs."""
        policy.add_adapter(self.converter.linear_layers, self.settings.lora)

    def _read_frozen(self, folder: Path, model: PolicyModel, name: str) -> None:
        """Read nothing."""


class RehearsedMegatron(MegatronBackend):
    """One rank under fake tensors."""

    activation_shape: list[int]  # that stages send each other
    reads_on_host = False
    reducing: Callable[[], AbstractContextManager[None]] = nullcontext
    starting: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, settings: Settings, device: torch.device, total_steps: int) -> None:
        super().__init__(settings, device, total_steps, _BuilderWithoutWeights)
        for config in (model.stage.config for model in self.trained()):
            config.finalize_model_grads_func = self._finalized(config.finalize_model_grads_func)

    def _finalized(self, finalize: Callable[..., None]) -> Callable[..., None]:
        def finalized(*args: Any, **named: Any) -> None:
            with self.reducing():
                finalize(*args, **named)

        return finalized

    def sum_over_ranks(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return zeros: the stages exchange names and values, and there are none."""
        return dict.fromkeys(sums, 0.0)

    @property
    def vocabulary(self) -> int:
        """The width of this rank's logits."""
        stage = self.policy.stage
        return len(stage.head_weight()) if self.ranks.is_last_stage else 0

    def weights(self) -> Iterator[torch.Tensor]:
        """Yield the parameters, which may be parts of one buffer, and the buffers."""
        for model in self.models():
            yield from model_state(model.stage.chunks)
        if self.following is not None:
            yield from self.following.exact.values()

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield the fp32 buffers where gradients are accumulated."""
        for model in self.trained():
            yield from gradients(model.distributed)

    def optimizer_states(self) -> Iterator[torch.Tensor]:
        """Yield master weights and moments."""
        held = {tensor.untyped_storage()._cdata for tensor in self.weights()}
        for model in self.trained():
            adam: Any = model.optimizer.adam
            for part in getattr(adam, "chained_optimizers", [adam]):
                if part.optimizer is None:  # no parameters of its kind on this stage
                    continue
                masters = [p.detach() for group in part.optimizer.param_groups for p in group["params"]]
                yield from (p for p in masters if p.untyped_storage()._cdata not in held)
                for state in part.optimizer.state.values():
                    yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def expect(self, shard: TrainShard) -> None:
        """Compute the shape of the activations that arrive from other stages."""
        plan, config = shard.micro_batches[0], self.policy.stage.config
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        micro = collate(
            shard.batch,
            plan.samples,
            self.device,
            self.ranks.context.of(plan.context_parallel_size),
            share_prefixes=not self.settings.megatron.mtp_heads,
            row_multiple=multiple if plan.padded else None,
            reads_last=self.policy.reads_last,
        )
        rows, length = PackedTokens.of(micro, multiple).shape
        self.activation_shape = [length // multiple, rows, config.hidden_size]

    def hold_gradients(self, model: MegatronTrainedModel) -> None:  # type: ignore[type-arg]
        """Do nothing: the buffers are always there."""

    def allocate_states(self, model: MegatronTrainedModel) -> None:  # type: ignore[type-arg]
        """Take a step on gradients of zero."""
        model.optimizer.step()

    def shorten(self, leave_out: LeaveOut) -> None:
        """Let the block of layers of each chunk of each model run all but those that ``leave_out`` names.

        Overlapped reductions wait for every gradient of a bucket, and routers that replay need every layer's experts.
        """
        if self.policy.replays_experts or self.policy.records_experts:
            return
        if self.policy.distributed[0].ddp_config.overlap_grad_reduce:
            return
        stages = {id(model.stage): model.stage for model in self.models()}
        for block in (chunk.decoder for stage in stages.values() for chunk in stage.chunks):
            if indices := leave_out(block.layers):
                block.running = tuple(layer for place, layer in enumerate(block.layers) if place not in indices)
                block.__class__ = _ShortBlock

    def traced_micro_batches(self, micro_batches: int) -> int:
        """Return two: the memory that a micro-batch keeps shows between their forward passes.

        An interleaved pipeline runs those that its first stage has started at its peak, in groups of one per stage.
        """
        if not self._is_interleaved:
            return min(micro_batches, 2)
        stages = self.ranks.pp.size()
        return min(-(-micro_batches // stages), 2) * stages

    def micro_batches_in_flight(self, micro_batches: int) -> int:
        """Return those between forward and backward under the schedule of one forward, one backward."""
        if self._is_interleaved:
            return self.traced_micro_batches(micro_batches)
        return min(micro_batches, self.ranks.pp.size() - self.ranks.pp.rank())

    @property
    def _is_interleaved(self) -> bool:
        return len(self.policy.stage.chunks) > 1


class _ShortBlock(TransformerBlock):
    """A block that runs only some of its layers."""

    layers: nn.ModuleList
    num_layers_per_pipeline_rank: int
    running: tuple[nn.Module, ...]

    def forward(self, *args: Any, **named: Any) -> Any:
        """Run these layers. All the others are there again at the end."""
        running = nn.ModuleList(self.running)
        with set_within(self, layers=running, num_layers_per_pipeline_rank=len(running)):
            return super().forward(*args, **named)

    def _get_layer(self, layer_number: int) -> nn.Module:
        return self.running[layer_number]  # recomputation asks for it, after the forward pass


def _groups_of_this_rank() -> AbstractContextManager[None]:
    """Let Megatron create the process groups that this rank is in, and compute each division of the ranks once.

    With 1,024 ranks it creates thousands of others.
    """
    create, divide = parallel_state.create_group, parallel_state.generate_masked_orthogonal_rank_groups

    def create_own(ranks: list[int], *args: Any, **named: Any) -> Any:
        return create(ranks, *args, **named) if dist.get_rank() in ranks else dist.GroupMember.NON_GROUP_MEMBER

    def divide_once(world_size: int, sizes: list[int], mask: list[bool]) -> list[list[int]]:
        return [[*ranks] for ranks in _divided(divide, world_size, tuple(sizes), tuple(mask))]  # the caller's to change

    return set_within(parallel_state, create_group=create_own, generate_masked_orthogonal_rank_groups=divide_once)


@lru_cache(maxsize=64)
def _divided(divide: Any, world_size: int, sizes: tuple[int, ...], mask: tuple[bool, ...]) -> Any:
    return divide(world_size, [*sizes], [*mask])


@contextmanager
def rehearsed(
    settings: Settings, device: torch.device, total_steps: int, leave_out: LeaveOut, imbalance: float
) -> Iterator[RehearsedBackend]:
    """Build this rank, and forget Megatron's process groups at the end."""
    if settings.megatron.megatron_to_hf_mode != "raw":
        rule = "cannot be rehearsed: Megatron-Bridge builds a model from its weights"
        refuse("megatron_to_hf_mode", settings.megatron.megatron_to_hf_mode, rule, "use raw, or --train-backend fsdp")
    routing, packed, rotary = BalancedRouter.routing, PackedTokens.of, PackedRotaryEmbedding.__init__
    built: list[RehearsedMegatron] = []

    def expected_shapes(*_: Any, **__: Any) -> tuple[list[int], list[int]]:
        return built[0].activation_shape, built[0].activation_shape

    def assumed_routing(self: BalancedRouter, logits: torch.Tensor, *args: Any, **named: Any) -> Any:
        probabilities, _ = routing(self, logits, *args, **named)
        tokens, experts = probabilities.shape
        group = parallel_state.get_expert_model_parallel_group()
        with unset_fake_temporarily():
            chosen = assumed_experts(tokens, experts, self.topk, dist.get_rank(group), group.size(), imbalance)
            return probabilities, torch.from_numpy(chosen.copy())  # every layer has its own

    def without_values(self: PackedRotaryEmbedding, frequencies: torch.Tensor) -> None:
        """Keep the shape only: every layer computes the cosines and sines of all tokens."""
        rotary(self, torch.empty(frequencies.shape, dtype=torch.float32))

    def packed_at_start(*args: Any) -> PackedTokens:
        built[0].starting()
        return packed(*args)

    try:
        with (
            set_within(PackedTokens, of=packed_at_start),
            set_within(PackedRotaryEmbedding, __init__=without_values),
            set_within(clip_grads, l2_norm_impl=_norm),
            set_within(P2PCommunicator, _communicate_shapes=expected_shapes),
            set_within(BalancedRouter, routing=assumed_routing),
        ):
            with _groups_of_this_rank():
                built.append(RehearsedMegatron(settings, device, total_steps))
            built[0].shorten(leave_out)
            yield built[0]
    finally:
        MoEAuxLossAutoScaler.main_loss_backward_scale = None  # it outlives a run
        parallel_state.destroy_model_parallel()


def _norm(_chunk: int, _flag: Any, lists: list[list[torch.Tensor]], *_: Any) -> tuple[torch.Tensor, None]:
    """Compute the norm of the gradients as Megatron's function for CPU does, which reads each tensor's norm."""
    return torch.stack([tensor.norm() for tensor in lists[0]]).norm().reshape(1), None


@lru_cache(maxsize=2)
def assumed_experts(tokens: int, experts: int, topk: int, rank: int, ranks: int, imbalance: float) -> np.ndarray:
    """Choose the experts of each token: the experts of one expert-parallel rank get ``imbalance`` times the average.

    Returns:
        bool [tokens, experts], ``topk`` in each row. The other ranks' experts share the rest equally.
    """
    here = experts // ranks
    most = tokens * min(topk, here)
    least = tokens * max(0, topk - (experts - here))
    local = int(np.clip(round(imbalance * tokens * topk / ranks), least, most))
    ends = (np.arange(tokens + 1) * local) // max(tokens, 1)
    count = np.diff(ends)[:, None]  # of this rank's experts, per token
    before = ends[:-1, None]
    slot = np.arange(topk)[None]
    elsewhere = np.maximum(experts - here, 1)
    others = np.arange(tokens)[:, None] * topk - before  # of the other ranks' experts, used by the tokens before
    other = (others + slot - count) % elsewhere
    mine = rank * here + (before + slot) % here
    chosen = np.where(slot < count, mine, np.where(other < rank * here, other, other + here))
    mask = np.zeros((tokens, experts), bool)
    np.put_along_axis(mask, chosen, True, axis=1)
    return mask
