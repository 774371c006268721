"""What tests/gpu looks for in the files of runs, with files made here."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_llama import save_tiny_llama
from transformers import AutoModelForCausalLM

from tests.gpu.run_checks import assert_adapter, assert_equal_runs


@pytest.fixture
def two_runs(tmp_path):
    folders = [tmp_path / name for name in ("first", "second")]
    for folder, seconds in zip(folders, (1.0, 2.0), strict=True):
        (folder / "hf").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "train/loss": 0.5, "time/step": seconds}) + "\n")
        save_file({"a": torch.ones(3), "b": torch.zeros(2)}, folder / "hf" / "model.safetensors")
    return folders


def test_equal_runs_may_differ_in_time_only(two_runs):
    assert_equal_runs(*two_runs)
    weights = load_file(two_runs[1] / "hf" / "model.safetensors")
    save_file(weights | {"a": weights["a"].nextafter(torch.tensor(2.0))}, two_runs[1] / "hf" / "model.safetensors")
    with pytest.raises(AssertionError, match="differ in a$"):
        assert_equal_runs(*two_runs)


def test_a_metric_that_differs_is_named(two_runs):
    (two_runs[1] / "metrics.jsonl").write_text(json.dumps({"step": 1, "train/loss": 0.5000001}) + "\n")
    with pytest.raises(AssertionError, match="step 1: .*train/loss"):
        assert_equal_runs(*two_runs)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """Return the folders of a model, of an adapter that peft has saved, and of their sum in bf16."""
    root = tmp_path_factory.mktemp("adapted")
    save_tiny_llama(root / "base", tied=False)
    base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(root / "adapter")
    model.merge_and_unload().to(torch.bfloat16).save_pretrained(root / "export")
    return root


def check(root, export="export"):
    assert_adapter(root / "base", root / "adapter", root / export, torch.bfloat16)


def test_the_sum_of_weights_and_adapter_passes(adapted):
    check(adapted)


@pytest.mark.parametrize(
    ("name", "says"),
    [("model.norm.weight", "also changed"), ("model.layers.0.self_attn.q_proj.weight", "q_proj")],
    ids=["another weight", "another sum"],
)
def test_a_weight_that_should_be_another_is_named(adapted, name, says):
    shutil.copytree(adapted / "export", adapted / says.replace(" ", "_"))
    file = adapted / says.replace(" ", "_") / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {name: weights[name] * 1.1}, file, {"format": "pt"})
    with pytest.raises(AssertionError, match=says):
        check(adapted, says.replace(" ", "_"))
