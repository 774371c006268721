"""Weights between Hugging Face's names and whole tensors, and Megatron's parameters on this rank.

Both ways go one parameter at a time: no rank ever holds more of the model than its own part and one whole tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from transformers import PretrainedConfig

from miles.arguments.megatron.shape import HEADS_IN_CONFIG, megatron_shape
from miles.training.megatron.model.policy_model import PolicyModel
from miles.training.megatron.process_groups import Ranks
from miles.training.megatron.weights.hf_weights import HuggingFaceWeights
from miles.training.megatron.weights.parameter_names import HEAD, Binding, ParameterNames, global_name, is_of_head


@dataclass(frozen=True)
class _Place:
    """Where a parameter is: its shard's shape, the pipeline stage, and the expert-parallel rank of an expert."""

    shape: tuple[int, ...]
    pp_rank: int
    ep_rank: int


class WeightConverter:
    """For the models of one config on one layout of ranks (conversion.py)."""

    def __init__(self, config: PretrainedConfig, ranks: Ranks) -> None:
        hf_config = config.to_dict()
        self.shape = shape = megatron_shape(hf_config)
        self.names = ParameterNames(hf_config, shape)
        self.ranks = ranks
        self._reads_heads = bool(hf_config.get(HEADS_IN_CONFIG))
        self._spread = float(hf_config.get("initializer_range") or 0.02)
        self._experts_a_rank = shape.get("num_moe_experts", 0) // ranks.ep.size()

    def shape_of(self, config: PretrainedConfig) -> dict[str, Any]:
        return megatron_shape(config.to_dict())

    @torch.no_grad()
    def load(self, model: PolicyModel, weights: HuggingFaceWeights) -> None:
        """Fill the parameters of ``model``, in their dtype. Not collective: every rank reads what it needs."""
        for name, parameter in self._local(model).items():
            binding = self.names.binding(name)
            group = self._tensor_group(binding)
            if is_of_head(binding.hf_names[0]) and not self._reads_heads:
                parameter.copy_(self._drawn(binding, parameter, group))
                continue
            whole = [weights.tensor(hf_name) for hf_name in binding.hf_names]
            parameter.copy_(binding.layout.from_hf(whole, group.rank(), group.size()))

    def _drawn(self, binding: Binding, like: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """A head's parameter where the checkpoint has no heads: norms are 1, matrices normal; as its name says, and
        the same for every layout."""
        if like.dim() == 1 and not binding.hf_names[0].endswith("bias"):
            return torch.ones_like(like)
        shapes = [t.shape for t in binding.layout.to_hf([like.to("meta", torch.float32)] * group.size())]
        whole = []
        for hf_name, shape in zip(binding.hf_names, shapes, strict=True):
            generator = torch.Generator().manual_seed(zlib.crc32(hf_name.encode()))
            deviation = 0.0 if hf_name.endswith("bias") else self._spread
            whole.append(deviation * torch.randn(shape, generator=generator))
        return binding.layout.from_hf(whole, group.rank(), group.size())

    def export(
        self, model: PolicyModel, value: Callable[[torch.nn.Parameter], torch.Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors by Hugging Face name, in the order of the layers, on every rank; a tied head comes once.

        ``value`` gives what is exported of a parameter: its data, or its gradient; of its shape, in any dtype.
        """
        local = self._local(model)
        for name, place in self._whole_model(local).items():
            if name == HEAD and self.names.tied:
                continue
            binding = self.names.binding(name)
            here = place.pp_rank == self.ranks.pp.rank() and place.ep_rank in (-1, self.ranks.ep.rank())
            shard = value(local[name]).detach().to(dtype).contiguous() if here else None
            tensors = self._gathered(binding, place, shard, dtype)
            yield from zip(binding.hf_names, tensors, strict=True)

    def _local(self, model: PolicyModel) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters by their names in the whole model."""
        first_layer = get_transformer_layer_offset(model.config, pp_rank=self.ranks.pp.rank())
        first_expert = self.ranks.ep.rank() * self._experts_a_rank
        return {
            global_name(n, first_layer, first_expert): p
            for n, p in model.named_parameters()
            if n not in model.NOT_IN_CHECKPOINT
        }

    def _whole_model(self, local: dict[str, torch.nn.Parameter]) -> dict[str, _Place]:
        """Every parameter of the model, in order, and where it is."""
        pp_rank, ep_rank = self.ranks.pp.rank(), self.ranks.ep.rank()
        mine = {
            name: _Place(tuple(p.shape), pp_rank, ep_rank if self.names.binding(name).is_expert else -1)
            for name, p in local.items()
        }
        of_stage = _gather_objects(mine, self.ranks.ep)
        merged: dict[str, _Place] = {}
        for places in _gather_objects([entry for part in of_stage for entry in part.items()], self.ranks.pp):
            merged |= dict(places)
        return merged

    def _gathered(
        self, binding: Binding, place: _Place, shard: torch.Tensor | None, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """The whole tensors, on every rank: gathered over tensor parallel where they are, then sent to the others."""
        group = self._tensor_group(binding)
        device = torch.device("cpu") if dist.get_backend(group) == "gloo" else torch.device("cuda")
        like = torch.empty(place.shape, dtype=dtype, device="meta")
        shapes = [tensor.shape for tensor in binding.layout.to_hf([like] * group.size())]
        if shard is not None:
            shards = [torch.empty_like(shard) for _ in range(group.size())]
            dist.all_gather(shards, shard, group=group)
            tensors = [tensor.contiguous() for tensor in binding.layout.to_hf(shards)]
        else:
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        if binding.is_expert and self.ranks.pp.rank() == place.pp_rank:
            _send_to_all(tensors, self.ranks.ep, place.ep_rank)
        _send_to_all(tensors, self.ranks.pp, place.pp_rank)
        return tensors

    def _tensor_group(self, binding: Binding) -> dist.ProcessGroup:
        return self.ranks.expert_tp if binding.is_expert else self.ranks.tp


def _gather_objects(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


def _send_to_all(tensors: list[torch.Tensor], group: dist.ProcessGroup, source: int) -> None:
    if group.size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, dist.get_global_rank(group, source), group=group)
