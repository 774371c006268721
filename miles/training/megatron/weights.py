"""Move weights between Hugging Face checkpoints and Megatron's parameters on this rank.

``build_converter`` returns the converter that ``--megatron-to-hf-mode`` names: miles' own (raw, in this file), or one
by Megatron-Bridge (bridge.py). Both directions process parameter by parameter: no rank ever holds more of the model
than its own part and one whole tensor.
"""

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from transformers import PretrainedConfig

from miles.config.lora import is_in_experts
from miles.models.base import HEAD, HEADS_IN_CONFIG, Binding, is_of_head
from miles.models.registry import converted_family, megatron_shape
from miles.training.megatron.hf_files import HuggingFaceWeights
from miles.training.megatron.model.adapter import LinearLayer, linear_layers
from miles.training.megatron.moe import expert_biases
from miles.training.megatron.policy_model import PolicyModel
from miles.training.megatron.process_groups import Ranks
from miles.types.groups import gather_objects


class WeightConverter(Protocol):
    """Converts the models of one config on one layout of ranks."""

    shape: dict[str, Any]
    """The fields of ``TransformerConfig`` that the model's config determines."""

    def shape_of(self, config: PretrainedConfig) -> dict[str, Any]:
        """Return the shape of another model. Raises ``ValueError`` for one that would not be computed correctly."""

    def load(self, model: PolicyModel, weights: HuggingFaceWeights) -> None:
        """Fill the parameters of ``model``, in their dtype. Every rank of the layout calls it.

        Raises ``ValueError`` naming a tensor that the checkpoint does not have, or has in another shape.
        """

    def export(
        self, model: PolicyModel, value: Callable[[torch.nn.Parameter], torch.Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors by Hugging Face name, in the same order on every rank; a tied head once. Collective.

        ``value`` returns the exported tensor of a parameter: its data or its gradient, in its shape and any dtype.
        """

    def linear_layers(self, model: PolicyModel) -> list[LinearLayer]:
        """Return the decoder's linear layers of a chunk that can get an adapter, with their names in the whole model.

        Raises ``ValueError`` if the converter knows no adapters.
        """


def build_converter(mode: str, config: PretrainedConfig, weights: HuggingFaceWeights, ranks: Ranks) -> WeightConverter:
    """Return the converter that ``--megatron-to-hf-mode`` names. ``weights`` are read from ``--hf-checkpoint``."""
    match mode:
        case "raw":
            return RawConverter(config, ranks)
        case "bridge":
            from miles.training.megatron.bridge import BridgeConverter  # its package may not be installed

            return BridgeConverter(config, weights, ranks)
        case _:
            raise ValueError(f"--megatron-to-hf-mode {mode}: unknown; give raw or bridge")


@dataclass(frozen=True)
class _Location:
    """A parameter's location: its shard's shape, the pipeline stage, and the expert-parallel rank of an expert."""

    shape: tuple[int, ...]
    pp_rank: int
    ep_rank: int  # -1: on every one


class RawConverter:
    """Converts by the names and layouts of ``miles.models``."""

    def __init__(self, config: PretrainedConfig, ranks: Ranks) -> None:
        hf_config = config.to_dict()
        family = converted_family(hf_config)
        self.shape = shape = family.shape(hf_config)
        self.names = family.parameters(hf_config, shape)
        self.ranks = ranks
        self._reads_heads = bool(hf_config.get(HEADS_IN_CONFIG))
        self._spread = float(hf_config.get("initializer_range") or 0.02)
        self._experts_per_rank = shape.get("num_moe_experts", 0) // ranks.ep.size()

    def shape_of(self, config: PretrainedConfig) -> dict[str, Any]:
        """Return the shape of another model. Raises ``ValueError`` for one that would not be computed correctly."""
        return megatron_shape(config.to_dict())

    @torch.no_grad()
    def load(self, model: PolicyModel, weights: HuggingFaceWeights) -> None:
        """Fill the parameters of ``model``, in their dtype. Not collective: ranks read the tensors that they need."""
        if self.names.tied:
            weights.check_head_is_embedding()
        for name, parameter in self._local(model).items():
            binding = self.names.binding(name)
            group = self._tensor_group(binding)
            if is_of_head(binding.hf_names[0]) and not self._reads_heads:
                parameter.copy_(self._drawn(binding, parameter, group))
                continue
            whole = [weights.tensor(hf_name) for hf_name in binding.hf_names]
            for hf_name, tensor, shape in zip(binding.hf_names, whole, _shapes(binding, parameter, group), strict=True):
                if tensor.shape != shape:  # a layout would cut it, fill it up or repeat it
                    raise ValueError(
                        f"{weights.label}: its {hf_name} has the shape {tuple(tensor.shape)}, and its config asks for "
                        f"{tuple(shape)}; correct config.json, or copy the folder again"
                    )
            parameter.copy_(binding.layout.from_hf(whole, group.rank(), group.size()))

    def _drawn(self, binding: Binding, like: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Draw a head's parameter, for a checkpoint without heads: norms are 1, biases 0, matrices normal.

        The seed is the parameter's name, so the numbers are the same in every layout.
        """
        if like.dim() == 1 and not binding.hf_names[0].endswith("bias"):
            return torch.ones_like(like)
        whole = []
        for hf_name, shape in zip(binding.hf_names, _shapes(binding, like, group), strict=True):
            generator = torch.Generator().manual_seed(zlib.crc32(hf_name.encode()))
            deviation = 0.0 if hf_name.endswith("bias") else self._spread
            whole.append(deviation * torch.randn(shape, generator=generator))
        return binding.layout.from_hf(whole, group.rank(), group.size())

    def export(
        self, model: PolicyModel, value: Callable[[torch.nn.Parameter], torch.Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors by Hugging Face name, in the same order on every rank; a tied head once.

        ``value`` returns the exported tensor of a parameter: its data or its gradient, in its shape and any dtype.
        Buffers (the biases of experts) are exported unchanged.
        """
        local = self._local(model)
        for name, location in self._whole_model(local).items():
            if name == HEAD and self.names.tied:
                continue
            binding = self.names.binding(name)
            here = location.pp_rank == self.ranks.pp.rank() and location.ep_rank in (-1, self.ranks.ep.rank())
            exported_dtype = torch.float32 if binding.is_buffer else dtype
            shard = None
            if here:
                tensor = local[name]
                exported = value(tensor) if isinstance(tensor, torch.nn.Parameter) else tensor
                shard = exported.detach().to(exported_dtype).contiguous()
            tensors = self._gathered(binding, location, shard, exported_dtype)
            yield from zip(binding.hf_names, tensors, strict=True)

    def _local(self, model: PolicyModel) -> dict[str, torch.Tensor]:
        """Return this rank's parameters, and the biases of its experts, by their names in the whole model."""
        first_expert = self.ranks.ep.rank() * self._experts_per_rank
        local: dict[str, torch.Tensor] = {}
        for chunk in model.chunks:
            first_layer = get_transformer_layer_offset(chunk.config, chunk.vp_stage, self.ranks.pp.rank())
            for name, tensor in (*chunk.named_parameters(), *expert_biases(chunk)):
                if chunk.is_of_checkpoint(name):
                    local[_global_name(name, first_layer, first_expert)] = tensor
        return local

    def linear_layers(self, model: PolicyModel) -> list[LinearLayer]:
        """Return the decoder's linear layers of a chunk that can get an adapter, by their names in the whole model."""
        first_layer = get_transformer_layer_offset(model.config, model.vp_stage, self.ranks.pp.rank())
        layers = []
        for name, module in linear_layers(model):
            binding = self.names.binding(f"{_global_name(name, first_layer, 0)}.weight")
            hf_names = tuple(hf_name.removesuffix(".weight") for hf_name in binding.hf_names)
            if not (model.config.num_moe_experts and any(map(is_in_experts, hf_names))):
                layers.append(LinearLayer(module, hf_names, binding.layout))
        return layers

    def _whole_model(self, local: dict[str, torch.Tensor]) -> dict[str, _Location]:
        """Return where every parameter of the model is, in order."""
        pp_rank, ep_rank = self.ranks.pp.rank(), self.ranks.ep.rank()
        here = {
            name: _Location(tuple(p.shape), pp_rank, ep_rank if self.names.binding(name).is_expert else -1)
            for name, p in local.items()
        }
        of_stage = gather_objects(here, self.ranks.ep)
        merged: dict[str, _Location] = {}
        for locations in gather_objects([entry for part in of_stage for entry in part.items()], self.ranks.pp):
            merged |= dict(locations)
        return merged  # of an interleaved pipeline, by stage and then by layer

    def _gathered(
        self, binding: Binding, location: _Location, shard: torch.Tensor | None, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Return the whole tensors on every rank: gathered over tensor parallelism on their stage, then broadcast."""
        group = self._tensor_group(binding)
        device = torch.device("cpu") if dist.get_backend(group) == "gloo" else torch.device("cuda")
        if shard is not None:
            shards = [shard]
            if group.size() > 1:
                shards = [torch.empty_like(shard) for _ in range(group.size())]
                dist.all_gather(shards, shard, group=group)
            tensors = [tensor.contiguous() for tensor in binding.layout.to_hf(shards)]
        else:
            like = torch.empty(location.shape, device="meta")
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape in _shapes(binding, like, group)]
        if binding.is_expert and self.ranks.pp.rank() == location.pp_rank:
            _send_to_all(tensors, self.ranks.ep, location.ep_rank)
        _send_to_all(tensors, self.ranks.pp, location.pp_rank)
        return tensors

    def _tensor_group(self, binding: Binding) -> dist.ProcessGroup:
        return self.ranks.expert_tp if binding.is_expert else self.ranks.tp


def _shapes(binding: Binding, part: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Size]:
    """Return the shapes of the whole Hugging Face tensors, if every rank of ``group`` holds a tensor like ``part``."""
    return [tensor.shape for tensor in binding.layout.to_hf([part.to("meta")] * group.size())]


def _global_name(name: str, first_layer: int, first_expert: int) -> str:
    """Return the local name ``decoder.layers.0…`` with the layer's and expert's numbers in the whole model."""
    name = re.sub(r"(?<=decoder\.layers\.)\d+", lambda match: str(int(match[0]) + first_layer), name)
    return re.sub(r"(?<=local_experts\.)\d+", lambda match: str(int(match[0]) + first_expert), name)


def _send_to_all(tensors: list[torch.Tensor], group: dist.ProcessGroup, source: int) -> None:
    if group.size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, dist.get_global_rank(group, source), group=group)
