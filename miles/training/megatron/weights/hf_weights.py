"""Tensors of a Hugging Face checkpoint by name, read one at a time."""

from __future__ import annotations

import json
from collections.abc import KeysView
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open

GENERATION_CONFIG = "generation_config.json"
_INDEX = "model.safetensors.index.json"


class HuggingFaceWeights:
    """The safetensors files of ``path``, a folder or the name of a model on the hub; they are mapped, not loaded."""

    def __init__(self, path: str) -> None:
        folder = Path(path)
        if not folder.is_dir():
            folder = Path(
                snapshot_download(path, allow_patterns=["*.safetensors", _INDEX, "config.json", GENERATION_CONFIG])
            )
        self._file_of = _files_by_tensor(folder)
        self._folder = folder
        self.path = path

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor, in the checkpoint's dtype, on CPU. Raises ``ValueError`` if there is none of the name."""
        if name not in self._file_of:
            raise ValueError(
                f"the checkpoint {self.path} has no tensor {name}, which its config asks for; "
                "check that the folder is complete"
            )
        with safe_open(self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)

    @property
    def names(self) -> KeysView[str]:
        """Of all tensors."""
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor, from its file's header."""
        with safe_open(self._file_of[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def generation_config(self) -> str | None:
        """The text of generation_config.json, or None where there is none."""
        file = self._folder / GENERATION_CONFIG
        return file.read_text() if file.is_file() else None


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    if (folder / _INDEX).is_file():
        weight_map = json.loads((folder / _INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    file = folder / "model.safetensors"
    if not file.is_file():
        raise ValueError(
            f"--hf-checkpoint {folder}: no safetensors file in it, and --train-backend megatron reads no other format; "
            "save it with transformers' save_pretrained, or use --train-backend fsdp"
        )
    with safe_open(file, framework="pt") as opened:
        return {name: file for name in opened.keys()}  # noqa: SIM118  # not a dictionary
