"""A folder that transformers' ``from_pretrained`` loads, written shard file by shard file."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import PretrainedConfig

from miles.training.megatron.weights.hf_weights import GENERATION_CONFIG
from miles.weights import in_chunks

FILE_BYTES = 4 * 1024**3


def export_hf(
    folder: Path,
    config: PretrainedConfig,
    generation_config: str | None,
    weights: Iterator[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    config_entries: dict[str, int],
) -> None:
    """Write safetensors files with their index, config.json and generation_config.json.

    Every rank gathers, rank 0 writes, and holds at most one file's tensors. ``config_entries`` go into
    the config where they are not 0, or no longer what it says.
    """
    writes = dist.get_rank() == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(config)
        config.dtype = dtype
        for name, value in config_entries.items():
            if value or hasattr(config, name):
                setattr(config, name, value)
        config.save_pretrained(folder)
        if generation_config is not None:  # as it is: transformers would not save every one that it reads
            (folder / GENERATION_CONFIG).write_text(generation_config)
    file_of: dict[str, str] = {}
    total = 0
    for number, chunk in enumerate(in_chunks(weights, FILE_BYTES), start=1):
        if writes:
            file = f"model-{number:05d}.safetensors"
            save_file({n: t.contiguous() for n, t in chunk.tensors.items()}, folder / file, {"format": "pt"})
            file_of |= dict.fromkeys(chunk.tensors, file)
            total += sum(tensor.nbytes for tensor in chunk.tensors.values())
    if writes:
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    dist.barrier()
