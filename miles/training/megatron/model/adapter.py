"""A low-rank adapter on Megatron's linear layers (docs/recipes.md), with the arithmetic and the files of peft's.

A fused layer holds several layers of the Hugging Face model (``linear_qkv``: q_proj, k_proj, v_proj). Each of them has
its own A [rank, in] and B [out, rank], so the trained parameters are the ones that peft would train on the Hugging Face
model.

Under tensor parallelism a column-parallel layer has A on every rank and its rows of B; a row-parallel layer has its
columns of A, and B on every rank. Ranks exchange the product of A, which is ``rank`` wide, and nothing else.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import nn

from miles.base.attributes import set_within
from miles.config.lora import LoraArguments
from miles.models.base import QueryKeyValue, TensorLayout
from miles.training.adapter_folder import check_layer_names, is_named, selecting_names
from miles.types.groups import gather_objects

PARTS = ("lora_A", "lora_B")


@dataclass
class AdapterMode:
    """How the adapters of a model compute at present. One object, which all layers share."""

    is_on: bool = True
    drops: bool = False  # --lora-dropout, in passes with a gradient


@dataclass(frozen=True)
class LinearLayer:
    """One of Megatron's linear layers on this rank, and the layers of the Hugging Face model that it holds."""

    module: ColumnParallelLinear | RowParallelLinear
    hf_names: tuple[str, ...]  # in the order of the layout
    layout: TensorLayout

    @property
    def is_row_parallel(self) -> bool:
        """Whether ranks share the columns of the weight, and not its rows."""
        return isinstance(self.module, RowParallelLinear)

    @property
    def blocks(self) -> int:
        """How often the rows of the held layers alternate on this rank: once per group of query heads."""
        size = self.module.tp_group.size()
        return self.layout.groups // size if isinstance(self.layout, QueryKeyValue) else 1

    @property
    def rows(self) -> list[int]:
        """The rows of each held layer on this rank."""
        total: int = self.module.weight.shape[0]
        if isinstance(self.layout, QueryKeyValue):
            keys = self.blocks * self.layout.width
            return [total - 2 * keys, keys, keys]
        return [total // len(self.hf_names)] * len(self.hf_names)


class LayerAdapter(nn.Module):
    """The adapters of one linear layer: A and B by the number of the held layer. ``chosen`` has those that get one."""

    def __init__(self, layer: LinearLayer, chosen: Sequence[bool], lora: LoraArguments, mode: AdapterMode) -> None:
        super().__init__()
        linear = layer.module
        self.hf_names = layer.hf_names
        self.rows, self.blocks, self.is_row_parallel = layer.rows, layer.blocks, layer.is_row_parallel
        self.scaling = lora.lora_alpha / lora.lora_rank
        self.dropout = lora.lora_dropout
        self.mode = mode
        self.tp: dist.ProcessGroup = linear.tp_group
        self.is_sequence_parallel: bool = linear.sequence_parallel and self.tp.size() > 1
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        device = linear.weight.device
        for number, is_chosen in enumerate(chosen):
            if is_chosen:
                a = torch.zeros(lora.lora_rank, linear.weight.shape[1], dtype=torch.float32, device=device)
                b = torch.zeros(self.rows[number], lora.lora_rank, dtype=torch.float32, device=device)
                self.lora_A[str(number)], self.lora_B[str(number)] = nn.Parameter(a), nn.Parameter(b)
        divided, whole = (self.lora_A, self.lora_B) if self.is_row_parallel else (self.lora_B, self.lora_A)
        for parameter in divided.values():  # read where gradient norms and checkpoints count each element once
            set_tensor_model_parallel_attributes(parameter, True, self.divided_dim, 1)
        for parameter in whole.values():  # its gradient covers the rank's own tokens; Megatron sums it up
            parameter.sequence_parallel = self.is_sequence_parallel

    @property
    def divided_dim(self) -> int:
        """The dimension along which ranks share A of a row-parallel layer, or B of a column-parallel one."""
        return 1 if self.is_row_parallel else 0

    def divides(self, part: str) -> bool:
        """Return whether tensor-parallel ranks share ``lora_A`` or ``lora_B``."""
        return part == ("lora_A" if self.is_row_parallel else "lora_B")

    def parameters_by_name(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Yield the name of the Hugging Face layer, ``lora_A`` or ``lora_B``, and this rank's part of it."""
        for number in self.lora_A:
            for part in PARTS:
                yield self.hf_names[int(number)], part, getattr(self, part)[number]

    def add_to(self, linear: nn.Module, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> Any:
        """Add the adapter's product to what ``linear`` returns: a forward hook."""
        if not self.mode.is_on:
            return output
        product, bias = output
        return product + self(inputs[0]), bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return (alpha / rank) B A x, laid out as the layer's output. ``inputs`` [s, B, in] are the layer's inputs."""
        narrow = [F.linear(self._dropped(inputs), a.to(inputs.dtype)) for a in self.lora_A.values()]
        together = self._exchanged(torch.cat(narrow, -1)) * self.scaling
        products = iter(together.chunk(len(narrow), -1))
        outputs = [
            F.linear(next(products), self.lora_B[str(number)].to(inputs.dtype))
            if str(number) in self.lora_B
            else together.new_zeros(*together.shape[:-1], rows)
            for number, rows in enumerate(self.rows)
        ]
        return self._interleaved(outputs)

    def _dropped(self, inputs: torch.Tensor) -> torch.Tensor:
        if not (self.dropout and self.mode.drops):
            return inputs
        if not (self.is_row_parallel or self.is_sequence_parallel):
            return F.dropout(inputs, self.dropout)  # ranks have the same inputs, and drop the same
        with get_cuda_rng_tracker().fork():
            return F.dropout(inputs, self.dropout)

    def _exchanged(self, narrow: torch.Tensor) -> torch.Tensor:
        """Return the products of A for the tokens that B is applied to. Collective over tensor parallelism."""
        if self.is_row_parallel and self.is_sequence_parallel:
            result = reduce_scatter_to_sequence_parallel_region(narrow, group=self.tp)
        elif self.is_row_parallel:
            result = reduce_from_tensor_model_parallel_region(narrow, group=self.tp)
        elif self.is_sequence_parallel:
            result = gather_from_sequence_parallel_region(narrow, tensor_parallel_output_grad=True, group=self.tp)
        else:
            result = copy_to_tensor_model_parallel_region(narrow, group=self.tp)  # backward sums the ranks' gradients
        exchanged: torch.Tensor = result
        return exchanged

    def _interleaved(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Join the held layers' outputs along the last dimension, in the order of the rows of the fused weight."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.unflatten(-1, (self.blocks, -1)) for part in parts], -1).flatten(-2)

    @torch.no_grad()
    def product(self) -> torch.Tensor:
        """Return (alpha / rank) B A in fp32, of the shape of this rank's part of the weight."""
        columns = next(iter(self.lora_A.values())).shape[1]
        parts = [
            self.lora_B[str(number)] @ self.lora_A[str(number)]
            if str(number) in self.lora_A
            else torch.zeros(rows, columns, device=next(self.parameters()).device)
            for number, rows in enumerate(self.rows)
        ]
        return self._interleaved([part.t() for part in parts]).t() * self.scaling


@dataclass(frozen=True)
class Place:
    """A layer with an adapter: its pipeline stage, and the numbers that it reads and gives."""

    stage: int
    inputs: int
    outputs: int


class Adapter(nn.Module):
    """The adapters of one rank's layers.

    In an interleaved pipeline each chunk of the rank has an object with the parameters of the chunk's layers. The
    methods of the last one cover the layers of all chunks.
    """

    def __init__(self, layers: Sequence[LinearLayer], lora: LoraArguments, earlier: Sequence[Adapter] = ()) -> None:
        """Make the adapters of a chunk's ``layers``; ``earlier`` are the adapters of the rank's chunks before it."""
        super().__init__()
        self.mode: AdapterMode = earlier[-1].mode if earlier else AdapterMode()
        self.lora = lora
        self.layers = nn.ModuleList()
        self._earlier = tuple(earlier)  # a tuple, so that their parameters are not this chunk's
        self._of_weight: dict[int, LayerAdapter] = dict(earlier[-1]._of_weight) if earlier else {}
        self.linear_names: list[str] = [*earlier[-1].linear_names] if earlier else []
        self.linear_names += [name for layer in layers for name in layer.hf_names]
        self.places: dict[str, Place] = {}  # of all stages, one after another; gather_places() fills it
        self.names: list[str] = []  # as adapter_config.json selects them
        for layer in layers:
            chosen = [is_chosen(name, lora) for name in layer.hf_names]
            if any(chosen):
                adapter = LayerAdapter(layer, chosen, lora, self.mode)
                self.layers.append(adapter)
                self._of_weight[id(layer.module.weight)] = adapter
                layer.module.register_forward_hook(adapter.add_to)

    def parameters_by_name(self) -> Iterator[tuple[LayerAdapter, str, str, nn.Parameter]]:
        """Yield each layer's adapter, the name of the Hugging Face layer, ``lora_A`` or ``lora_B``, and its part."""
        for chunk in (*self._earlier, self):
            for layer in chunk.layers:
                assert isinstance(layer, LayerAdapter)
                yield from ((layer, *named) for named in layer.parameters_by_name())

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Draw A as peft does, and set B to 0. The numbers depend on the name and ``seed``, not on the layout."""
        for layer, name, part, parameter in self.parameters_by_name():
            if part == "lora_B":
                parameter.zero_()
                continue
            parts = layer.tp.size() if layer.divides(part) else 1
            whole = torch.empty(len(parameter), parameter.shape[1] * parts)
            generator = torch.Generator().manual_seed((zlib.crc32(name.encode()) << 20) ^ seed)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            parameter.copy_(whole.chunk(parts, 1)[layer.tp.rank() if parts > 1 else 0])

    def merged(self, weight: nn.Parameter) -> torch.Tensor:
        """Return this rank's part of ``weight`` with its adapter added, in fp32; the weight itself if it has none."""
        adapter = self._of_weight.get(id(weight))
        return weight.data if adapter is None else weight.data.float() + adapter.product()

    def off(self) -> AbstractContextManager[None]:
        """Compute without the adapter within the block."""
        return set_within(self.mode, is_on=False)

    def dropping(self) -> AbstractContextManager[None]:
        """Drop inputs by ``--lora-dropout`` within the block."""
        return set_within(self.mode, drops=True)

    def gather_places(self, pipeline: dist.ProcessGroup) -> None:
        """Learn which layers of all stages have an adapter. Collective over the pipeline.

        Raises:
            ValueError: On every rank, if a name of ``--target-modules`` is no linear layer.
        """
        sizes_here: dict[str, tuple[int, int]] = {}
        for layer, name, part, parameter in self.parameters_by_name():
            size = layer.tp.size()
            inputs, outputs = sizes_here.get(name, (0, 0))
            if part == "lora_A":
                inputs = parameter.shape[1] * (size if layer.divides(part) else 1)
            else:
                outputs = parameter.shape[0] * (size if layer.divides(part) else 1)
            sizes_here[name] = inputs, outputs
        stages = gather_objects((self.linear_names, sizes_here), pipeline)
        linear = [name for names, _ in stages for name in names]
        check_layer_names(self.lora, linear, "the model")
        self.places = {
            name: Place(stage, *sizes) for stage, (_, sizes_of) in enumerate(stages) for name, sizes in sizes_of.items()
        }
        self.names = selecting_names(self.places.keys(), linear)

    @torch.no_grad()
    def whole(
        self, pipeline: dist.ProcessGroup, value: Callable[[nn.Parameter], torch.Tensor] = torch.Tensor.detach
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``model.layers.0.self_attn.q_proj.lora_A`` and its whole tensor, fp32, on every rank. Collective.

        ``value`` returns the tensor to yield for a parameter: itself or its gradient, in its shape.
        """
        local = {(name, part): (layer, value(p)) for layer, name, part, p in self.parameters_by_name()}
        gloo = dist.get_backend(pipeline) == "gloo"
        for name, place in self.places.items():
            for part in PARTS:
                rank = self.lora.lora_rank
                shape = (rank, place.inputs) if part == "lora_A" else (place.outputs, rank)
                if (name, part) in local:
                    layer, held = local[name, part]
                    tensor = held.contiguous()
                    if layer.divides(part) and layer.tp.size() > 1:
                        parts = [torch.empty_like(tensor) for _ in range(layer.tp.size())]
                        dist.all_gather(parts, tensor, group=layer.tp)
                        tensor = torch.cat(parts, layer.divided_dim)
                else:
                    tensor = torch.empty(shape, device="cpu" if gloo else "cuda")
                if pipeline.size() > 1:
                    dist.broadcast(tensor, dist.get_global_rank(pipeline, place.stage), group=pipeline)
                assert tensor.shape == shape
                yield f"{name}.{part}", tensor


def is_chosen(name: str, lora: LoraArguments) -> bool:
    """Return whether the Hugging Face layer ``name`` gets an adapter."""
    wanted = not lora.targets or any(is_named(name, target) for target in lora.targets)
    return wanted and not any(is_named(name, target) for target in lora.excluded)


def linear_layers(model: nn.Module) -> Iterator[tuple[str, ColumnParallelLinear | RowParallelLinear]]:
    """Yield the linear layers of the decoder by name, without the layers of experts, heads and the vocabulary."""
    for name, module in model.named_modules():
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
            continue
        if re.match(r"decoder\.layers\.\d+\.(?!.*experts)", name):
            yield name, module
