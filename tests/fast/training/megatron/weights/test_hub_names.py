"""A checkpoint given by its hub name is read from the hub's cache, with its generation config."""

from pathlib import Path

import huggingface_hub.constants
import torch
from pytest import MonkeyPatch
from safetensors.torch import save_file

from miles.training.megatron.hf_files import HuggingFaceWeights

REVISION = "0" * 40
TEXT = '{"eos_token_id": [1, 7], "temperature": 0.3}'  # transformers reads this, and would not save it


def _in_cache(cache: Path, name: str) -> Path:
    root = cache / f"models--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs/main").write_text(REVISION)
    folder = root / "snapshots" / REVISION
    folder.mkdir(parents=True)
    save_file({"weight": torch.arange(3.0)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_hub_name_has_its_generation_config(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (_in_cache(tmp_path, "somebody/says") / "generation_config.json").write_text(TEXT)
    _in_cache(tmp_path, "somebody/does-not")

    says = HuggingFaceWeights("somebody/says")
    assert torch.equal(says.tensor("weight"), torch.arange(3.0))
    assert says.generation_config() == TEXT
    assert HuggingFaceWeights("somebody/does-not").generation_config() is None
