"""A layer with recurrent state computes packed samples as it computes each on its own, whatever their lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_kinds import config_of
from tiny_llama import SHAPE
from tolerance import rounding_error
from torch import nn
from transformers import AutoModelForCausalLM

from miles.training.fsdp.models import reset_states_between_samples
from miles.training.packed_attention import PackedLayout

# Kernels scan in chunks of 64 and 256 tokens. The last three samples share a prompt of 70 tokens.
LENGTHS = (1, 3, 300, 64, 71, 130, 70 + 200)
PROMPT = 70


def recurrent_layer(kind: str) -> nn.Module:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_of(kind, initializer_range=0.2))
    reset_states_between_samples(model)
    (layer,) = (module for module in model.modules() if isinstance(getattr(module, "conv1d", None), nn.Conv1d))
    return layer


def packed_samples() -> np.ndarray:
    """Return the packed token at each position, sample after sample."""
    index = np.arange(sum(LENGTHS))
    starts = np.cumsum(LENGTHS) - LENGTHS
    for start in starts[-2:]:
        index[start : start + PROMPT] = index[starts[-3] : starts[-3] + PROMPT]
    return np.unique(index, return_inverse=True)[1]


def assert_close(actual: torch.Tensor, wanted: torch.Tensor, roundings: int) -> None:
    """Compare by the largest entry: the scan is in float32 whatever the dtype of the layer."""
    error = rounding_error(roundings, wanted.abs().max().item())
    torch.testing.assert_close(actual, wanted, rtol=0, atol=error)


@pytest.mark.parametrize("kind", ["nemotron_h", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
@pytest.mark.parametrize("training", [False, True])
def test_outputs_and_gradients_are_those_of_each_sample_alone(kind, training):
    layer = recurrent_layer(kind).train(training).double()
    index = packed_samples()
    tokens = torch.randn(index.max() + 1, SHAPE["hidden_size"], dtype=torch.float64, requires_grad=True)
    layout = PackedLayout.of_packed(index, LENGTHS, tokens.device)
    outputs = layer(tokens[None], packed=layout, attention_mask=None)[0][index]
    wanted = torch.cat([layer(tokens[part][None])[0] for part in np.split(index, np.cumsum(LENGTHS)[:-1])])
    assert_close(outputs, wanted, max(LENGTHS))
    unaware = layer(tokens[None])[0][index]
    assert (unaware - wanted).abs().max() > 0.01 * wanted.abs().max()

    # A token of several samples has one output, which the first of them gives to the layers that follow.
    cotangent = torch.randn_like(wanted)
    inputs = (tokens, *layer.parameters())
    for mine, theirs in zip(
        torch.autograd.grad((outputs * cotangent).sum(), inputs),
        torch.autograd.grad((wanted * cotangent).sum(), inputs),
        strict=True,
    ):
        # A decay's gradient adds up differences of all tokens, which cancel to about the size of one of them.
        assert_close(mine, theirs, max(LENGTHS) * sum(LENGTHS))
