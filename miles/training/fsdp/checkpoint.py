"""Checkpoints through torch.distributed.checkpoint, which re-shards on loading; and the Hugging Face export."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.distributed.checkpoint import state_dict
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.utils import GENERATION_CONFIG_NAME

from miles.config.settings import Settings
from miles.models.base import HEADS_IN_CONFIG
from miles.training.adapter_folder import check_adapter
from miles.training.checkpoint_files import read_run_state, reference_folder, use_umask, write_run_state
from miles.training.checkpoint_io import StagedFiles, StagingWriter, checked_index, loading, save_errors
from miles.training.fsdp import models
from miles.training.fsdp.adapter import add_adapter, merged_weights, names_on_disk, save_adapter
from miles.training.fsdp.runner import ShardedOptimizer

# Give weights the names and shapes that they have in checkpoints of the model's publishers.
#
# transformers changes some while it loads a model: it holds the experts of a layer as one tensor, for instance.
# Servers load the names on disk. SGLang 0.5.23 passes over others in silence (``models/qwen3_moe.py``,
# ``glm4_moe.py``) or ends (``qwen3_next.py``), and knows the names of transformers for some families only.


def as_on_disk(
    model: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``weights`` of ``model`` as ``save_pretrained`` would write them, in the same order.

    One tensor of the model at once becomes one or more on disk. If several become one, the model is converted as a
    whole, which takes the memory of all weights.
    """
    changes = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
    if not changes:
        yield from weights
    elif any(len(change.target_patterns) > 1 for change in changes if isinstance(change, WeightConverter)):
        yield from revert_weight_conversion(model, dict(weights)).items()
    else:
        for name, weight in weights:
            yield from revert_weight_conversion(model, {name: weight}).items()


def save_model(
    folder: Path, model: nn.Module, optimizer: ShardedOptimizer, state: dict[str, Any], staged: StagedFiles | None
) -> None:
    """Write a model, its optimizer and ``state`` into ``folder``, or its tensors into ``staged``.

    The caller makes the folder appear at once (atomic).
    """
    tensors = {"model": _trained_state(model), "optimizer": _optimizer_state(model, optimizer)}
    _write(folder, tensors, state, optimizer.state(), staged)


def _write(
    folder: Path, tensors: dict[str, Any], state: dict[str, Any], schedule: dict[str, Any], staged: StagedFiles | None
) -> None:
    with save_errors(folder):
        dcp.save(tensors, storage_writer=StagingWriter(folder, staged))
    if dist.get_rank() == 0:
        write_run_state(folder, "fsdp", state, schedule)


def _read_into(tensors: dict[str, Any], folder: Path, flag: str) -> dict[str, Any]:
    """Fill ``tensors`` from ``folder``, and return its ``state.json``. Raises ``ValueError`` naming ``flag``."""
    state = read_run_state(folder, "fsdp", flag)
    checked_index(folder, flag)
    with loading(folder, flag):
        dcp.load(tensors, checkpoint_id=folder)
    return state


def load_model(folder: Path, model: nn.Module, optimizer: ShardedOptimizer, with_optimizer: bool) -> dict[str, Any]:
    """Read what ``save_model`` wrote, under any number of ranks, and return all of ``state.json``."""
    tensors: dict[str, Any] = {"model": _trained_state(model)}
    if with_optimizer:
        tensors["optimizer"] = _optimizer_state(model, optimizer)
    state = _read_into(tensors, folder, "--load")
    _set_state(model, tensors["model"])
    if with_optimizer:
        groups = optimizer.adam.param_groups
        settings_of_run = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        state_dict.set_optimizer_state_dict(model, optimizer.adam, tensors["optimizer"])
        for group, settings in zip(optimizer.adam.param_groups, settings_of_run, strict=True):
            group |= settings  # the state has replaced weight decay, betas and eps by the saved run's
        optimizer.steps_done = state["schedule"]["steps_done"]
    return state


def _trained_state(model: nn.Module) -> dict[str, Any]:
    """Return the model's state without frozen weights: with an adapter, the adapter alone."""
    parameters = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    return {name: value for name, value in state_dict.get_model_state_dict(model).items() if name not in frozen}


def _set_state(model: nn.Module, state: dict[str, Any]) -> None:
    is_whole = all(parameter.requires_grad for parameter in model.parameters())
    state_dict.set_model_state_dict(model, state, options=state_dict.StateDictOptions(strict=is_whole))


def _optimizer_state(model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Any]:
    """Return Adam's state by parameter name.

    PyTorch creates the state of an optimizer that has not stepped yet by stepping it at a rate of 0, and counts that.
    """
    state: dict[str, Any] = state_dict.get_optimizer_state_dict(model, optimizer.adam)
    if optimizer.steps_done == 0:
        for of_parameter in (*optimizer.adam.state.values(), *state["state"].values()):
            of_parameter["step"].zero_()
    return state


def load_weights(folder: Path, model: PreTrainedModel, flag: str) -> None:
    """Read the weights alone, in the model's dtype. Raises ``ValueError`` naming ``flag`` if it cannot."""
    tensors = {"model": _trained_state(model)}
    _read_into(tensors, folder, flag)
    _set_state(model, tensors["model"])


def save_reference(folder: Path, model: PreTrainedModel, staged: StagedFiles | None = None) -> None:
    """Add a reference that follows the policy to the checkpoint that is being written into ``folder``."""
    _write(reference_folder(folder), {"model": state_dict.get_model_state_dict(model)}, {}, {"steps_done": 0}, staged)


def load_reference(within: Path, model: PreTrainedModel) -> None:
    """Read what ``save_reference`` wrote into ``within``."""
    tensors = {"model": state_dict.get_model_state_dict(model)}
    _read_into(tensors, within, "--load")
    state_dict.set_model_state_dict(model, tensors["model"])


def export_hf(
    folder: Path, model: PreTrainedModel, weights: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    """Write safetensors, config.json and generation_config.json; every rank gathers, rank 0 keeps and writes."""
    writes = dist.get_rank() == 0
    # A gathered tensor may be a view of padded storage, which safetensors refuses: hence the copy.
    state = {name: tensor.clone() for name, tensor in as_on_disk(model, weights) if writes}
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        config = type(model.config).from_dict(model.config.to_dict())
        config.dtype = dtype
        config.architectures = [type(model).__name__]  # the text model of a larger one has a config that names none
        if getattr(config, HEADS_IN_CONFIG, None):
            setattr(config, HEADS_IN_CONFIG, 0)  # transformers leaves the heads of a checkpoint out
        config.save_pretrained(folder)
        if model.generation_config is not None:
            # Unchanged: ``save_pretrained`` refuses some that ``from_pretrained`` reads.
            model.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME)
        save_torch_state_dict(state, folder)
        use_umask(folder.glob("*.safetensors"))
    dist.barrier()


# Export the weights of a checkpoint in one process.


def export(settings: Settings, checkpoint: Path, folder: Path) -> None:
    """Write the weights of ``checkpoint`` into ``folder`` as ``FsdpBackend.export_hf`` would. One rank."""
    assert settings.model.hf_checkpoint is not None
    dtype = torch.bfloat16 if settings.training.bf16 else torch.float32
    loaded = dtype if settings.lora.trains_adapter else torch.float32  # as FsdpBackend loads it
    model = models.load_model(settings.model.hf_checkpoint, loaded)
    if settings.lora.trains_adapter:
        add_adapter(model, settings.lora, settings.training.seed)
    check_adapter(checkpoint, settings.lora, names_on_disk(model), str(checkpoint))
    load_weights(checkpoint, model, str(checkpoint))
    export_hf(folder, model, merged_weights(model, dtype), dtype)
    save_adapter(folder, model, settings)
