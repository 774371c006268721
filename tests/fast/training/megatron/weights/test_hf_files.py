"""Folders of safetensors that are incomplete or contradict their config, and what ranks hold during an export."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from safetensors.torch import save_file
from tiny_llama import tiny_llama

from miles.training.megatron.hf_files import INDEX, HuggingFaceWeights, export_hf

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _save(folder: Path, **tensors: torch.Tensor) -> None:
    """Save each tensor in a separate file, with an index."""
    for name, tensor in tensors.items():
        save_file({name: tensor}, folder / f"{name}.safetensors", {"format": "pt"})
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (folder / INDEX).write_text(json.dumps(index))


def test_a_missing_and_a_cut_file_are_named_with_the_flag(tmp_path: Path) -> None:
    _save(tmp_path, gone=torch.ones(2), cut=torch.ones(200), whole=torch.ones(3))
    (tmp_path / "gone.safetensors").unlink()
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    weights = HuggingFaceWeights(str(tmp_path), "--ref-load")
    assert torch.equal(weights.tensor("whole"), torch.ones(3))
    for name in ("gone", "cut"):
        with pytest.raises(ValueError, match=f"^--ref-load {tmp_path}: {name}.safetensors cannot be read "):
            weights.tensor(name)
    with pytest.raises(ValueError, match=f"^--ref-load {tmp_path}: it has no tensor none, "):
        weights.tensor("none")


def test_a_cut_file_without_an_index_is_named_with_the_flag(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=f"^--ref-load {tmp_path}: model.safetensors cannot be read "):
        HuggingFaceWeights(str(tmp_path), "--ref-load")


def test_another_format_is_refused_with_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^--opd-teacher-load {tmp_path}: no safetensors file found, "):
        HuggingFaceWeights(str(tmp_path), "--opd-teacher-load")


@pytest.mark.parametrize("difference", [0.0, 1e-3])
def test_a_head_beside_a_tied_embedding_must_equal_it(tmp_path: Path, difference: float) -> None:
    embedding = torch.arange(6.0).view(3, 2)
    save_file({EMBEDDING: embedding, HEAD: embedding + difference}, tmp_path / "model.safetensors", {"format": "pt"})
    weights = HuggingFaceWeights(str(tmp_path))
    if not difference:
        weights.check_head_is_embedding()
        return
    with pytest.raises(ValueError, match=f"^--hf-checkpoint {tmp_path}: .*set tie_word_embeddings to false"):
        weights.check_head_is_embedding()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_write_hold_nothing(tmp_path: Path, monkeypatch: MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    held: list[int] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        references: list[weakref.ref[torch.Tensor]] = []
        for number in range(4):
            tensor = torch.full((3,), float(number))
            references.append(weakref.ref(tensor))
            yield f"weight{number}", tensor
            del tensor
            held.append(sum(reference() is not None for reference in references))

    export_hf(tmp_path / "out", tiny_llama(1).config, None, weights(), torch.float32, {})
    assert held == ([1, 2, 3, 4] if rank == 0 else [0, 0, 0, 0])
    assert (tmp_path / "out").exists() == (rank == 0)
