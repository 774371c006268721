"""Export the weights of a checkpoint in one process. On CPU, ``cpu_support.support_cpu`` comes before this import."""

from collections.abc import Callable
from pathlib import Path

import torch

from miles.base.flags import collect_errors
from miles.config.lora import LoraArguments, check_adapter_with_model
from miles.config.settings import Settings
from miles.models.base import HEADS_IN_CONFIG
from miles.models.reading import read_config
from miles.training.adapter_folder import adapter_folder, check_adapter, write_adapter
from miles.training.megatron.checkpoint import load_weights
from miles.training.megatron.hf_files import HuggingFaceWeights, export_hf
from miles.training.megatron.model.adapter import Adapter
from miles.training.megatron.model.transformer_config import transformer_config
from miles.training.megatron.policy_model import PolicyModel
from miles.training.megatron.process_groups import Ranks, initialize_process_groups
from miles.training.megatron.versions import megatron_version
from miles.training.megatron.weights import WeightConverter, build_converter


def export(settings: Settings, checkpoint: Path, folder: Path) -> None:
    """Write the weights of ``checkpoint`` into ``folder`` as ``MegatronBackend.export_hf`` would. One rank."""
    assert settings.model.hf_checkpoint is not None
    megatron_version()
    dtype = torch.bfloat16 if settings.training.bf16 else torch.float32
    ranks = initialize_process_groups(settings.dims, settings.training.seed)
    hf_config = read_config(settings.model.hf_checkpoint)
    hf_weights = HuggingFaceWeights(settings.model.hf_checkpoint)
    converter = build_converter(settings.megatron.megatron_to_hf_mode, hf_config, hf_weights, ranks)
    config = transformer_config(
        settings.megatron,
        settings.megatron_overrides,
        converter.shape,
        dtype,
        gradient_checkpointing=False,
        per_token_loss=False,
    )
    config.mtp_num_layers = settings.megatron.mtp_num_layers
    temperature, chunk_size = settings.rollout.rollout_temperature, settings.loss.log_probs_chunk_size
    policy = PolicyModel(config, hf_config, ranks, temperature, chunk_size, with_canary=False)
    names: list[str] = []
    if settings.lora.trains_adapter:
        converter.load(policy, hf_weights)
        names = add_adapter(policy, converter, settings.lora, hf_config.model_type, ranks).names
    check_adapter(checkpoint, settings.lora, names, str(checkpoint))
    load_weights(checkpoint, policy, ranks, str(checkpoint))
    heads = {HEADS_IN_CONFIG: settings.megatron.mtp_heads}
    weights = converter.export(policy, exported_value(policy), dtype)
    export_hf(folder, hf_config, hf_weights.generation_config(), weights, dtype, heads)
    save_adapter(folder, policy, settings, ranks)


# The adapter of a Megatron model (model/adapter.py): put into its layers, exported, and written for peft.


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
