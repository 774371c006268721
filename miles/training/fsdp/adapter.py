"""A low-rank adapter on a Hugging Face model, by peft: its layers, its format on disk, and its sum with the weights.

peft wraps each chosen linear layer into a layer of peft: ``q_proj.weight`` becomes ``q_proj.base_layer.weight``,
alongside ``q_proj.lora_A.default.weight`` [rank, in] and ``q_proj.lora_B.default.weight`` [out, rank].
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from miles.base.attributes import set_within
from miles.base.flags import collect_errors
from miles.config.lora import ALL_LINEAR, LoraArguments, counts_experts, is_in_experts, refuse_projections_of_experts
from miles.config.settings import Settings
from miles.models.packing import reads_images
from miles.training.adapter_folder import check_layer_names, peft_config, selecting_names, write_adapter
from miles.training.fsdp.models import INDEXER

_ADAPTER = "default"  # peft's name of a model's only adapter


def add_adapter(model: PreTrainedModel, lora: LoraArguments, seed: int) -> None:
    """Put a new adapter into the chosen layers of ``model``, in place, and freeze everything else.

    The adapter is fp32, whatever the dtype of the weights. A is random by ``seed``, and B is 0, so the model's outputs
    stay the same.

    Raises:
        ValueError: A name of ``--target-modules`` is no linear layer of the model.
    """
    from peft import inject_adapter_in_model

    _check_layers(model, lora)
    excluded = [*lora.excluded, *_outside_language(model)]
    config = peft_config(lora, list(lora.targets) or _all_linear(model), exclude_modules=excluded or None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # every rank draws the same A, and keeps its part
        inject_adapter_in_model(config, model)
    model.requires_grad_(False)
    for layer in adapted_layers(model).values():
        for part in (layer.lora_A, layer.lora_B):
            part.float().requires_grad_(True)


def _check_layers(model: PreTrainedModel, lora: LoraArguments) -> None:
    if counts_experts(model.config.to_dict()):
        with collect_errors() as errors:  # of a model on a hub, whose config the validator has not read
            refuse_projections_of_experts(lora, errors)
    check_layer_names(lora, _linear_layers(model), f"a {model.config.model_type}")


def _linear_layers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers that can learn: an indexer's layers get no gradient."""
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name in linear if INDEXER not in name.split(".")]


def _outside_language(model: PreTrainedModel) -> list[str]:
    """Return the linear layers of a vision tower and its projector: adapters are for the language part."""
    if not reads_images(model.config.to_dict()):
        return []
    return [name for name in _linear_layers(model) if "language_model" not in name.split(".") and name != "lm_head"]


def _all_linear(model: PreTrainedModel) -> str | list[str]:
    """Return what has peft choose all linear layers of the decoder.

    Of a model with experts it would choose these too, and the routers: so all other names are given.
    """
    if not counts_experts(model.config.to_dict()):
        return ALL_LINEAR
    names = {name.split(".")[-1] for name in _linear_layers(model)}
    return sorted(name for name in names - {"lm_head", "gate"} if not is_in_experts(name))


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return peft's layers with an adapter, by their names in the model; empty for a model without one."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Compute without the adapter within the block.

    peft's own switch (``enable_adapters``) freezes the adapter too, and FSDP would never undo that.
    """
    with ExitStack() as layers:
        for layer in adapted_layers(model).values():
            layers.enter_context(set_within(layer, _disable_adapters=True))
        yield


def merged_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight of the model as it would be without peft, in ``dtype``; a tied head is the embedding.

    A weight with an adapter is ``W + (alpha / rank) B A``, added in fp32. Every rank gathers one by one. The buffers
    that checkpoints have (the biases of experts) follow, in their own dtype: no gradient reaches them.
    """
    layers = adapted_layers(model)
    for name, parameter in model.named_parameters():
        *path, last = name.split(".")
        owner = ".".join(path[:-1])
        if path and path[-1] == "base_layer" and owner in layers:
            weight = full_tensor(parameter)
            if last == "weight":
                layer = layers[owner]
                a, b = (full_tensor(part[_ADAPTER].weight) for part in (layer.lora_A, layer.lora_B))
                weight = weight.float() + (b @ a) * layer.scaling[_ADAPTER]
            yield f"{owner}.{last}", weight.to(dtype)
        elif ".lora_A." not in name and ".lora_B." not in name:
            # In its own dtype a gathered weight may be large: it is converted before.
            shard = parameter.detach().to(dtype)
            yield name, full_tensor(shard)
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that may be divided over the ranks. Collective if it is."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_adapter(folder: Path, model: PreTrainedModel, settings: Settings) -> None:
    """Write the adapter of ``model``, if it has one, into its folder in the checkpoint or export ``folder``.

    Every rank gathers, and rank 0 writes.
    """
    if not settings.lora.trains_adapter:
        return
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in adapted_layers(model).items():
        for part, parameters in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            tensors[f"{name}.{part}"] = full_tensor(parameters[_ADAPTER].weight).cpu()
    write_adapter(folder, tensors, names_on_disk(model), settings)


def names_on_disk(model: nn.Module) -> list[str]:
    """Return the names that select the adapted layers and no other: short ones, which engines read, if they do."""
    return selecting_names(adapted_layers(model).keys(), _linear_layers(model))
