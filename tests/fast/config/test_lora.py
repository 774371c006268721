"""The flags of adapters: all errors at once, before torch."""

import json

import pytest

from miles.config.explain import explain

LORA = "--train-backend fsdp --lora-rank 8"
ON_MEGATRON = "--train-backend megatron --lora-rank 8"


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        ("--lora-rank -1", ["--lora-rank -1: must be a finite number of at least 0; give 0 or more"]),
        (
            f"{LORA} --lora-alpha 0 --lora-dropout 1 --target-modules q_proj,*.v_proj lm_head",
            [
                "--lora-alpha 0: must be",
                "--lora-dropout 1.0: must be in [0, 1)",
                "v_proj is no name",
                "lm_head gets no",
            ],
        ),
        (f"{LORA} --target-modules all-linear,q_proj", ["all-linear has the other names in it"]),
        (f"{LORA} --target-modules ,", ["names no layer"]),
        (f"{ON_MEGATRON} --mtp-num-layers 1 --enable-mtp-training", ["--lora-rank 8: with --mtp-num-layers"]),
        (f"{ON_MEGATRON} --moe-z-loss-coeff 0.1", ["--lora-rank 8: with a loss of the routers"]),
    ],
)
def test_each_fault_is_reported(refused, flags, messages):
    found = refused(flags)
    assert len(found) == len(messages), found
    for message, words in zip(found, messages, strict=True):
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
