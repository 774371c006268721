"""Checkpoints through torch.distributed.checkpoint, which re-shards on loading; and the Hugging Face export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel

from miles.training.fsdp.optimizer import ShardedOptimizer
from miles.training.fsdp.policy import ValueModel

_STATE = "state.json"
_CRITIC = "critic"


def save(folder: Path, model: PreTrainedModel, optimizer: ShardedOptimizer, state: dict[str, Any]) -> None:
    """Write everything a resumed run needs into ``folder``; whoever calls makes the folder appear at once (atomic)."""
    _save_tensors(folder, model, optimizer, {"launcher": state})
    torch.save(_random_state(), _random_file(folder))
    dist.barrier()


def load(
    folder: Path, model: PreTrainedModel, optimizer: ShardedOptimizer, with_optimizer: bool, rng: bool
) -> dict[str, Any]:
    """Read what ``save`` wrote, under any number of ranks; returns the launcher's state."""
    state = _load_tensors(folder, model, optimizer, with_optimizer)
    if rng and _random_file(folder).exists():  # a rank that the saving run did not have starts from its own seed
        _restore_random_state(torch.load(_random_file(folder), weights_only=True))
    return state["launcher"]


def save_critic(folder: Path, model: ValueModel, optimizer: ShardedOptimizer) -> None:
    """Add the critic to the checkpoint that is being written into ``folder``."""
    _save_tensors(folder / _CRITIC, model, optimizer, {})


def load_critic(folder: Path, model: ValueModel, optimizer: ShardedOptimizer, with_optimizer: bool) -> None:
    """Read what ``save_critic`` wrote. Raises ``ValueError`` for a checkpoint of a run without a critic."""
    if not (folder / _CRITIC).is_dir():
        raise ValueError(
            f"--load {folder.parent}: {folder.name} has no critic, and --advantage-estimator ppo needs one; start from "
            "the model that --save-hf exported, as --hf-checkpoint, or load a checkpoint of a run with a critic"
        )
    _load_tensors(folder / _CRITIC, model, optimizer, with_optimizer)


def _save_tensors(folder: Path, model: nn.Module, optimizer: ShardedOptimizer, state: dict[str, Any]) -> None:
    tensors = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer.adam),
    }
    dcp.save(tensors, checkpoint_id=folder)
    if dist.get_rank() == 0:
        (folder / _STATE).write_text(json.dumps({**state, "schedule": optimizer.state()}))


def _load_tensors(folder: Path, model: nn.Module, optimizer: ShardedOptimizer, with_optimizer: bool) -> dict[str, Any]:
    tensors: dict[str, Any] = {"model": get_model_state_dict(model)}
    if with_optimizer:
        tensors["optimizer"] = get_optimizer_state_dict(model, optimizer.adam)
    dcp.load(tensors, checkpoint_id=folder)
    set_model_state_dict(model, tensors["model"])
    state: dict[str, Any] = json.loads((folder / _STATE).read_text())
    if with_optimizer:
        set_optimizer_state_dict(model, optimizer.adam, tensors["optimizer"])
        optimizer.steps_done = state["schedule"]["steps_done"]
    return state


def export_hf(
    folder: Path, model: PreTrainedModel, weights: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    """Write safetensors, config.json and generation_config.json; every rank gathers, rank 0 keeps and writes."""
    writes = dist.get_rank() == 0
    # A gathered tensor may be a view of padded storage, which safetensors refuses: hence the copy.
    state = {name: tensor.clone() for name, tensor in weights if writes}
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        config = type(model.config).from_dict(model.config.to_dict())
        config.dtype = dtype
        config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        save_torch_state_dict(state, folder)
    dist.barrier()


def _random_file(folder: Path) -> Path:
    return folder / f"random_state_rank{dist.get_rank()}.pt"


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
