"""The adapter of a Megatron model (model/adapter.py): put into its layers, exported, and written for peft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from miles.base.flags import collect_errors
from miles.config.lora import LoraArguments, check_adapter_with_model
from miles.config.settings import Settings
from miles.training.adapter_folder import adapter_folder, write_adapter
from miles.training.megatron.model.adapter import Adapter
from miles.training.megatron.policy_model import PolicyModel
from miles.training.megatron.process_groups import Ranks
from miles.training.megatron.weights import WeightConverter


def add_adapter(
    policy: PolicyModel, converter: WeightConverter, lora: LoraArguments, model_type: str, ranks: Ranks
) -> Adapter:
    """Put a new adapter of 0 into the chosen layers of ``policy``, and freeze everything else. Collective.

    Raises:
        ValueError: A name of ``--target-modules`` is no linear layer of the model, or it cannot have an adapter.
    """
    with collect_errors() as errors:  # of a model on a hub, whose config the validator has not read
        check_adapter_with_model(lora, model_type, converter.shape, errors)
    adapter = policy.add_adapter(converter.linear_layers, lora)
    adapter.gather_places(ranks.pp)
    return adapter


def exported_value(policy: PolicyModel) -> Callable[[torch.nn.Parameter], torch.Tensor]:
    """Return the exported tensor of a parameter: its data, with its adapter added."""
    return (lambda parameter: parameter.data) if policy.adapter is None else policy.adapter.merged


def save_adapter(folder: Path, policy: PolicyModel, settings: Settings, ranks: Ranks) -> None:
    """Write the adapter, if there is one, into its folder in the checkpoint or export ``folder``. Collective."""
    if policy.adapter is None:
        return
    base = settings.model.hf_checkpoint
    assert base is not None
    tensors = {name: tensor.cpu() for name, tensor in policy.adapter.whole(ranks.pp)}
    write_adapter(adapter_folder(folder), tensors, policy.adapter.names, settings.lora, base)
