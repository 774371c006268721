"""A configuration that transformers does not know is read as a known one, and no code of its folder is run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tolerance import log_prob_error
from transformers import DeepseekV3ForCausalLM

from miles.engine.embedded.model_runner import ModelRunner
from miles.models.reading import read_config
from miles.models.tiny import shrunk_config, write_model
from miles.training.fsdp.models import load_model

KIMI_K2 = dict(
    model_type="kimi_k2",
    architectures=["DeepseekV3ForCausalLM"],
    auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    vocab_size=64,
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=61,
    num_attention_heads=64,
    num_key_value_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=384,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    moe_intermediate_size=2048,
    routed_scaling_factor=2.827,
    max_position_embeddings=131072,
    rope_theta=50000.0,
    rope_scaling=dict(
        type="yarn",
        factor=32.0,
        original_max_position_embeddings=4096,
        beta_fast=1.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
)


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    small = shrunk_config(KIMI_K2)
    write_model(small, tmp_path)
    plain = DeepseekV3ForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "code.py").write_text("raise SystemExit('code of the folder was run')\n")
    original = small | {"auto_map": KIMI_K2["auto_map"]}
    (tmp_path / "config.json").write_text(json.dumps(original))

    config = read_config(str(tmp_path))
    assert config.model_type == "deepseek_v3" and config.architectures == ["DeepseekV3ForCausalLM"]
    assert config.rope_parameters["factor"] == 32.0 and config.rope_parameters["rope_theta"] == 50000.0
    policy = load_model(str(tmp_path), torch.float32)
    engine = ModelRunner(str(tmp_path), torch.float32, "cpu")
    assert type(policy) is type(engine.model) is DeepseekV3ForCausalLM
    prompt = [3, 9, 27, 17]
    with torch.no_grad():
        expected = plain(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(engine.prefill([prompt], 0)[0], expected, rtol=0, atol=log_prob_error(plain, [prompt]))


@pytest.fixture
def edited(tiny_model: str, tmp_path: Path) -> Callable[[Callable[[dict[str, torch.Tensor]], object]], str]:
    """Return a function that copies the tiny model with changed tensors, and returns the path."""

    def edit(change: Callable[[dict[str, torch.Tensor]], object]) -> str:
        folder = tmp_path / "edited"
        shutil.copytree(tiny_model, folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return str(folder)

    return edit


def readers(path: str) -> tuple[Callable[[], object], ...]:
    """Return what reads a model: the trainer on FSDP, and the embedded engine."""
    return lambda: load_model(path, torch.float32), lambda: ModelRunner(path, torch.float32, "cpu")


def test_missing_tensors_are_refused(edited):
    path = edited(lambda tensors: [tensors.pop(f"model.layers.1.mlp.{name}_proj.weight") for name in ("down", "up")])
    names = "the tensors model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.up_proj.weight"
    for read in readers(path):
        with pytest.raises(ValueError, match=re.escape(f"the model {path}: its files lack {names}, which its config")):
            read()


def test_many_missing_tensors_are_counted(edited):
    path = edited(lambda tensors: [tensors.pop(name) for name in sorted(tensors) if ".layers.1." in name])
    with pytest.raises(ValueError, match=r"lack the tensors model\.layers\.1\.input_layernorm.* and 6 more, which"):
        readers(path)[0]()


def test_tensors_of_another_shape_are_refused(edited):
    name = "model.layers.0.mlp.up_proj.weight"
    path = edited(lambda tensors: tensors.update({name: tensors[name][:60].clone()}))
    for read in readers(path):
        with pytest.raises(ValueError, match=re.escape(f"the tensor {name} ([60, 32], not [64, 32])")):
            read()


@pytest.mark.parametrize("spoil", [lambda file: file.write_bytes(file.read_bytes()[:-100]), Path.unlink])
def test_truncated_or_lost_weights_are_one_sentence(edited, spoil):
    path = edited(lambda tensors: None)
    spoil(Path(path, "model.safetensors"))
    for read in readers(path):
        with pytest.raises(ValueError, match=re.escape(f"the model {path}: its weights cannot be read (")):
            read()


@pytest.mark.parametrize("spoil", [lambda data: data[:-100], lambda data: b"", lambda data: b"x" * 200])
def test_broken_weights_in_torchs_format_are_one_sentence(edited, spoil):
    path = edited(lambda tensors: None)
    tensors = Path(path, "model.safetensors")
    file = Path(path, "pytorch_model.bin")
    torch.save(load_file(tensors), file)
    tensors.unlink()
    for read in readers(path):
        read()
    file.write_bytes(spoil(file.read_bytes()))
    for read in readers(path):
        with pytest.raises(ValueError, match=re.escape(f"the model {path}: its weights cannot be read (") + r"[^)]"):
            read()
