"""The adapter in a checkpoint or an export: its folder, its files, and a comparison with the flags of a run.

The files are peft's. They lie in a folder of their own, because transformers would add an adapter that it finds
alongside ``config.json`` to weights that hold it already.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from miles.config.lora import LoraArguments
from miles.config.settings import Settings
from miles.training.checkpoint_files import DamagedFile, read_json_object, use_umask

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # peft's names of parameters begin with it on disk


def adapter_folder(folder: Path) -> Path:
    """Return the folder of the adapter in a checkpoint or an export."""
    return folder / "adapter"


def holds_adapter(folder: Path) -> bool:
    """Return whether the checkpoint ``folder`` holds an adapter, and not all weights."""
    return adapter_folder(folder).is_dir()


def selecting_names(adapted: Collection[str], linear: Iterable[str]) -> list[str]:
    """Return the names that select ``adapted`` of all ``linear`` layers: short ones, which engines read, if they do."""
    short = {_last(name) for name in adapted}
    others = set(linear).difference(adapted)
    return sorted(adapted if any(_last(name) in short for name in others) else short)


def check_layer_names(lora: LoraArguments, linear: Collection[str], model: str) -> None:
    """Raise ``ValueError`` if a flag names a layer that is none of the ``linear`` layers of ``model``."""
    for flag, names in (("--target-modules", lora.targets), ("--exclude-modules", lora.excluded)):
        for name in names:
            if not any(is_named(layer, name) for layer in linear):
                known = ", ".join(sorted({_last(layer) for layer in linear} - {"lm_head"}))
                raise ValueError(f"{flag} {name}: {model} has no linear layer of this name; give some of {known}")


def is_named(layer: str, name: str) -> bool:
    """Return whether ``name``, a whole one or the end of one, selects a layer."""
    return layer == name or layer.endswith(f".{name}")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def peft_config(lora: LoraArguments, targets: str | list[str], **options: Any) -> Any:
    """Return peft's configuration of the adapter."""
    from peft import LoraConfig

    return LoraConfig(
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
        **options,
    )


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], layers: list[str], settings: Settings) -> None:
    """Write the adapter of the checkpoint or export ``folder`` as peft does: ``PeftModel.from_pretrained`` reads it.

    Collective; rank 0 writes.

    Args:
        folder: Gets a folder for the adapter.
        tensors: ``model.layers.0.self_attn.q_proj.lora_A`` and so on: whole tensors; of rank 0.
        layers: The names that select the layers with an adapter, and no others.
        settings: The settings of the run, with the flags of the adapter and the model without it.
    """
    if dist.get_rank() == 0:
        within = adapter_folder(folder)
        within.mkdir(parents=True, exist_ok=True)
        named = {f"{_PREFIX}{name}.weight": tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}
        save_file(named, within / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        use_umask([within / ADAPTER_WEIGHTS])
        base = settings.model.hf_checkpoint
        config = peft_config(settings.lora, layers, base_model_name_or_path=base, inference_mode=True).to_dict()
        plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
        (within / ADAPTER_CONFIG).write_text(json.dumps(plain, indent=2, sort_keys=True))
    dist.barrier()


def check_adapter(folder: Path, lora: LoraArguments, layers: list[str], flag: str) -> None:
    """Check that the checkpoint ``folder`` fits a model: it holds all weights, or an adapter like the model's own.

    Args:
        folder: The checkpoint.
        lora: The flags of the adapter that the model has; without ``--lora-rank`` it has none.
        layers: The names of the layers that have it, as ``adapter_config.json`` gives them.
        flag: The flag that named the checkpoint, for the error.

    Raises:
        ValueError: It holds something else.
    """
    name = f"{flag}: the checkpoint {folder}"
    if not holds_adapter(folder):
        if lora.trains_adapter:
            raise ValueError(
                f"{name} holds all weights, and --lora-rank {lora.lora_rank} trains an adapter; export it with "
                "miles export, and give the export as --hf-checkpoint"
            )
        return
    try:
        saved: dict[str, Any] = read_json_object(adapter_folder(folder), ADAPTER_CONFIG)
    except DamagedFile as fault:
        raise ValueError(f"{name} is damaged: {fault}") from None
    if not lora.trains_adapter:
        raise ValueError(
            f"{name} holds an adapter, not all weights; give what miles export makes of it, or resume it with "
            f"--lora-rank {saved.get('r')}"
        )
    for words, key, value in (
        ("--lora-rank", "r", lora.lora_rank),
        ("--lora-alpha", "lora_alpha", lora.lora_alpha),
        ("--target-modules", "target_modules", layers),
    ):
        if saved.get(key) != value:
            actual, wanted = (",".join(v) if isinstance(v, list) else v for v in (saved.get(key), value))
            raise ValueError(f"{name} holds an adapter of {words} {actual}, not {wanted}; give {words} {actual}")
