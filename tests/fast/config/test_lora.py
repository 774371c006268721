"""The flags of adapters: all errors at once, before torch."""

import json

import pytest

from miles.config.explain import explain
from tests.fast.support.rows import rows

LORA = "--train-backend fsdp --lora-rank 8"
ON_MEGATRON = "--train-backend megatron --lora-rank 8"


@pytest.mark.parametrize(("flags", "messages"), rows(__file__, "test_each_fault_is_reported"))
def test_each_fault_is_reported(refused, flags, messages):
    errors = refused(flags)
    assert len(errors) == len(messages), errors
    for message, words in zip(errors, messages, strict=True):
        assert words in message


def test_names_are_read_as_scripts_write_them(validated):
    lora = validated(f"{LORA} --target-modules linear_qkv,down_proj o_proj --exclude-modules k_proj").settings.lora
    assert lora.targets == ("q_proj", "k_proj", "v_proj", "down_proj", "o_proj") and lora.excluded == ("k_proj",)
    assert validated(f'{LORA} --target-modules ["q_proj","v_proj"]').settings.lora.targets == ("q_proj", "v_proj")
    assert validated(f"{LORA} --target-modules all-linear").settings.lora.targets == ()
    assert not validated("").settings.lora.trains_adapter


def test_explain_says_what_is_trained(validated):
    text = explain(validated(f"{LORA} --bf16 --target-modules linear_qkv"))
    assert "W x + 16/8 B A x in q_proj,k_proj,v_proj; only A and B are" in text
    assert "bf16 compute and frozen weights; fp32 adapter" in text
    assert "--target-modules linear_qkv: read as q_proj,k_proj,v_proj" in text


def test_experts_get_no_adapter(refused, validated, tmp_path):
    config = {"model_type": "qwen3_moe", "num_experts": 8, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = f"--hf-checkpoint {tmp_path} {LORA}"
    (message,) = refused(f"{model} --target-modules q_proj,gate_proj", without="--hf-checkpoint")
    assert message.startswith("--target-modules q_proj,gate_proj: gate_proj of a model with experts")
    notes = validated(f"{model}", without="--hf-checkpoint").notes
    assert any(note.startswith("--lora-rank: the layers of attention get an adapter") for note in notes)
