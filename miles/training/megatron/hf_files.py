"""Hugging Face checkpoints on disk: read tensor by tensor, and written file by file."""

import copy
import json
from collections import deque
from collections.abc import Iterator, KeysView
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig

from miles.models.base import EMBEDDING_HF, HEAD_HF
from miles.training.checkpoint_files import in_one_line, use_umask
from miles.types.weights import in_chunks

GENERATION_CONFIG = "generation_config.json"


INDEX = "model.safetensors.index.json"


FILE_BYTES = 4 * 1024**3  # of an exported file


class HuggingFaceWeights:
    """The safetensors files of ``path``, a folder or the name of a model on the hub; they are mapped, not loaded.

    ``flag`` gave the path, and is named in errors.
    """

    def __init__(self, path: str, flag: str = "--hf-checkpoint") -> None:
        folder = Path(path)
        if not folder.is_dir():
            folder = Path(
                snapshot_download(path, allow_patterns=["*.safetensors", INDEX, "config.json", GENERATION_CONFIG])
            )
        self.label = f"{flag} {path}"
        self._file_of = _files_by_tensor(folder, self.label)
        self._folder = folder
        self.path = path

    def tensor(self, name: str) -> torch.Tensor:
        """Return the whole tensor, in the checkpoint's dtype, on CPU. Raises ``ValueError`` if there is none."""
        if name not in self._file_of:
            raise ValueError(
                f"{self.label}: it has no tensor {name}, which its config asks for; check that the folder is complete"
            )
        with _opened(self._file_of[name], self.label) as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    @property
    def names(self) -> KeysView[str]:
        """The names of all tensors."""
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from its file's header."""
        with _opened(self._file_of[name], self.label) as file:
            return tuple(file.get_slice(name).get_shape())

    def check_head_is_embedding(self) -> None:
        """Check that a model whose config ties the head to the embedding has no other head in its files.

        transformers does not tie them then (5.19 ``modeling_utils.py``, ``tie_weights``), and so computes other logits.

        Raises:
            ValueError: The files have another head.
        """
        if HEAD_HF in self.names and not torch.equal(self.tensor(HEAD_HF), self.tensor(EMBEDDING_HF)):
            raise ValueError(
                f"{self.label}: its config has tie_word_embeddings true, and its {HEAD_HF} differs from "
                f"{EMBEDDING_HF}; set tie_word_embeddings to false in its config.json, or remove {HEAD_HF}"
            )

    def generation_config(self) -> str | None:
        """Return the text of generation_config.json, or None if there is none."""
        file = self._folder / GENERATION_CONFIG
        return file.read_text() if file.is_file() else None


def _files_by_tensor(folder: Path, label: str) -> dict[str, Path]:
    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    file = folder / "model.safetensors"
    if not file.is_file():
        raise ValueError(
            f"{label}: no safetensors file found, and --train-backend megatron reads no other format; save it with "
            "transformers' save_pretrained, or use --train-backend fsdp"
        )
    with _opened(file, label) as opened:
        return {name: file for name in opened.keys()}  # noqa: SIM118  # not a dictionary


@contextmanager
def _opened(file: Path, label: str) -> Iterator[Any]:
    """Open a safetensors file. Raises ``ValueError`` naming the flag that ``label`` the folder, and the file."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{label}: {file.name} cannot be read ({in_one_line(error)}); copy or download the folder again"
        ) from error


def export_hf(
    folder: Path,
    config: PretrainedConfig,
    generation_config: str | None,
    weights: Iterator[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    config_entries: dict[str, int],
) -> None:
    """Write a folder that transformers' ``from_pretrained`` loads: safetensors with their index, and both configs.

    Collective: every rank takes part in gathering ``weights``. Rank 0 writes, and holds at most one file's tensors; the
    others hold the tensors of one parameter.

    Args:
        folder: Where to write; created if needed.
        config: The model's config.
        generation_config: The text of generation_config.json, if any.
        weights: Whole tensors by name.
        dtype: The dtype of ``weights``, which the written config names.
        config_entries: Entries to set in the config; a 0 is set only if the config has the entry.
    """
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(config)
        config.dtype = dtype
        for name, value in config_entries.items():
            if value or hasattr(config, name):
                setattr(config, name, value)
        config.save_pretrained(folder)
        if generation_config is not None:  # unchanged: transformers would not save every one that it reads
            (folder / GENERATION_CONFIG).write_text(generation_config)
        _write_weights(folder, weights)
    else:
        deque(weights, maxlen=0)
    dist.barrier()


def _write_weights(folder: Path, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    file_of: dict[str, str] = {}
    total = 0
    for number, chunk in enumerate(in_chunks(weights, FILE_BYTES), start=1):
        file = f"model-{number:05d}.safetensors"
        save_file({n: t.contiguous() for n, t in chunk.tensors.items()}, folder / file, {"format": "pt"})
        file_of |= dict.fromkeys(chunk.tensors, file)
        total += sum(tensor.nbytes for tensor in chunk.tensors.values())
    use_umask(folder / file for file in set(file_of.values()))
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
