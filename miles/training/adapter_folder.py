"""The adapter in a checkpoint or an export: its place, and a comparison with the flags of a run.

The files are peft's. They lie in a folder of their own, because transformers would add an adapter that it finds beside
``config.json`` to weights that hold it already.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles.arguments.lora import LoraArguments
from miles.training.checkpoint_files import DamagedFile, read_json_object

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def adapter_folder(folder: Path) -> Path:
    """Return the place of the adapter in a checkpoint or an export."""
    return folder / "adapter"


def holds_adapter(folder: Path) -> bool:
    """Return whether the checkpoint ``folder`` is that of an adapter, and not of all weights."""
    return adapter_folder(folder).is_dir()


def check_adapter(folder: Path, lora: LoraArguments, layers: list[str], flag: str) -> None:
    """Check that the checkpoint ``folder`` holds what a model has: all weights, or an adapter like its own.

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
            found, own = (",".join(v) if isinstance(v, list) else v for v in (saved.get(key), value))
            raise ValueError(f"{name} holds an adapter of {words} {found}, not {own}; give {words} {found}")
