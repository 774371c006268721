"""A complete run trains an adapter on Megatron: saved as peft's, resumed in another layout, exported with it added."""

import pytest
from tolerance import FEW_ROUNDINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FLAGS = ["--train-backend", "megatron", "--lora-rank", "4", "--lora-alpha", "8", "--lr-decay-style", "constant"]
FLAGS += ["--lr", "1e-2", "--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3"]


def test_an_adapter_is_trained_saved_resumed_and_exported(launch, workplace, tiny_model):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    saved, exported = workplace / "lora_checkpoints", workplace / "lora_hf"
    saving = ["--save", str(saved), "--save-interval", "1"]
    first = launch("lora_tp2", *FLAGS, *saving, "--num-rollout", "1", "--tensor-model-parallel-size", "2", ranks=2)
    assert first.wait() == 0, first.err
    continuing = ["--num-rollout", "2", "--load", str(saved), "--save-hf", str(exported)]
    second = launch("lora_resumed", *FLAGS, *saving, *continuing)
    assert second.wait() == 0, second.err
    rows = first.rows() | second.rows()
    assert sorted(rows) == [1, 2, 3, 4] and all(row["train/grad_norm"] > 0 for row in rows.values())
    # The reference is the model without its adapter.
    assert rows[1]["train/kl_loss"] == pytest.approx(0.0, abs=FEW_ROUNDINGS)
    assert rows[4]["train/kl_loss"] > rows[1]["train/kl_loss"]

    before = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    adapters = []
    for done in (1, 2):
        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        adapted = PeftModel.from_pretrained(base, saved / f"iter_{done:07d}" / "adapter")
        adapters.append({name: value.clone() for name, value in adapted.named_parameters() if "lora_" in name})
    assert adapters[0].keys() == adapters[1].keys() and adapters[0]
    moved = [name for name in adapters[0] if not torch.equal(adapters[0][name], adapters[1][name])]
    assert {*moved} == {*adapters[0]}, "the second iteration continued with all of it"
    merged = dict(adapted.merge_and_unload().named_parameters())
    after = dict(AutoModelForCausalLM.from_pretrained(exported).named_parameters())
    assert after.keys() == merged.keys() == before.keys()
    assert all(torch.allclose(after[name], merged[name], rtol=0, atol=FEW_ROUNDINGS) for name in after)
    touched = {name for name in before if not torch.equal(before[name], after[name])}
    assert touched and all("_proj" in name for name in touched), "all other weights are the model's, bit for bit"
    assert first.none_left() and second.none_left()
