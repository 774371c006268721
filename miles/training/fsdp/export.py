"""Export the weights of a checkpoint in one process."""

from __future__ import annotations

from pathlib import Path

import torch

from miles.config.settings import Settings
from miles.training.adapter_folder import adapter_folder, check_adapter
from miles.training.fsdp.adapter import add_adapter, merged_weights, names_on_disk, save_adapter
from miles.training.fsdp.checkpoint import export_hf, load_weights
from miles.training.fsdp.models import load_policy


def export(settings: Settings, checkpoint: Path, folder: Path) -> None:
    """Write the weights of ``checkpoint`` into ``folder`` as ``FsdpBackend.export_hf`` would. One rank."""
    assert settings.model.hf_checkpoint is not None
    dtype = torch.bfloat16 if settings.training.bf16 else torch.float32
    temperature, chunk_size = settings.rollout.rollout_temperature, settings.loss.log_probs_chunk_size
    loaded = dtype if settings.lora.trains_adapter else torch.float32  # as FsdpBackend loads it
    model = load_policy(settings.model.hf_checkpoint, temperature, chunk_size, loaded).language_model
    if settings.lora.trains_adapter:
        add_adapter(model, settings.lora, settings.training.seed)
    check_adapter(checkpoint, settings.lora, names_on_disk(model), str(checkpoint))
    load_weights(checkpoint, model, str(checkpoint))
    export_hf(folder, model, merged_weights(model, dtype), dtype)
    if settings.lora.trains_adapter:
        save_adapter(adapter_folder(folder), model, settings.lora, settings.model.hf_checkpoint)
