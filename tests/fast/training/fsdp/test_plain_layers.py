"""Norms and rotary positions with few operations give transformers' results and gradients."""

import copy

import numpy as np
import pytest
import torch
from tolerance import RELATIVE_ERROR
from transformers import AutoConfig, AutoModelForCausalLM

from miles.training.fsdp.plain_layers import compute_with_few_operations
from miles.training.packed_attention import NAME, PackedLayout

LENGTHS = [5, 1, 9]


def tiny(model_type, dtype):
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=64)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config = AutoConfig.for_model(model_type, **shape, **heads, initializer_range=0.3)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    return model


def results(model, ids, weights):
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    layout = PackedLayout.of_packed(np.arange(sum(LENGTHS)), LENGTHS, torch.device("cpu"))
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, packed=layout).logits
    (logits * weights).sum().backward()
    return [logits.detach(), *(weight.grad for weight in model.parameters())]


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def pairs(request):
    """Return a function of the dtype: names, and results of our layers and of transformers'."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (1, sum(LENGTHS)), generator=generator)
    weights = torch.randn(1, sum(LENGTHS), 64, generator=generator)

    def compute(dtype):
        theirs = tiny(request.param, torch.float32).to(dtype)
        ours = copy.deepcopy(theirs)
        compute_with_few_operations(ours)
        names = ["logits", *(name for name, _ in theirs.named_parameters())]
        return names, *(results(model, ids, weights.to(dtype)) for model in (ours, theirs))

    return compute


def test_results_and_gradients_are_those_of_transformers(pairs):
    size = torch.cat([part.flatten() for part in pairs(torch.float32)[2][1:]]).norm()
    for name, mine, theirs in zip(*pairs(torch.float32), strict=True):
        # The gradient of a key's bias is rounding alone: a softmax does not change if all scores do.
        floor = 0.01 * size
        assert (mine - theirs).norm() <= RELATIVE_ERROR * torch.maximum(theirs.norm(), floor), name


def test_bf16_rounds_no_more_than_transformers(pairs):
    exact = pairs(torch.float32)[2]
    for name, mine, theirs, wanted in zip(*pairs(torch.bfloat16), exact, strict=True):
        error, usual = (mine - wanted).norm(), (theirs - wanted).norm()
        assert error <= 2 * usual, f"{name}: {error:.3g}, transformers' {usual:.3g}"


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_every_norm_and_attention_is_replaced(model_type):
    model = tiny(model_type, torch.float32)
    compute_with_few_operations(model)
    unchanged = [name for name, module in model.named_modules() if "forward" not in vars(module)]
    assert not [name for name in unchanged if name.endswith(("norm", "self_attn"))]
