"""A model gives the same results on packed sequences as on each sequence alone, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_llama import tiny_llama
from tolerance import RELATIVE_ERROR, log_prob_error
from transformers import LlamaForCausalLM

from miles.training import packed_attention
from miles.training.cpu import cached_attention
from miles.training.packed_attention import NAME, PackedLayout

CPU = torch.device("cpu")


def make_model(kv_heads: int, attention: str) -> LlamaForCausalLM:
    given = dict(num_key_value_heads=kv_heads, initializer_range=0.2, attn_implementation=attention)
    return tiny_llama(seed=3, **given).train()


def packed_logits(model, sequences):
    lengths = [len(s) for s in sequences]
    return model(
        input_ids=torch.cat(sequences)[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        use_cache=False,
        packed=PackedLayout.of_packed(np.arange(sum(lengths)), lengths, CPU),
    ).logits[0]


@pytest.mark.parametrize("short", [0, 512])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(5,), (1,), (7, 7, 7), (3, 40, 1, 19, 2, 41, 20)])
def test_packed_sequences_equal_each_sequence_alone(monkeypatch, lengths, kv_heads, short):
    monkeypatch.setattr(packed_attention, "SHORT", short)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 64, (n,), generator=generator) for n in lengths]
    weights = torch.randn(sum(lengths), 64, generator=generator)
    packed, alone = make_model(kv_heads, NAME), make_model(kv_heads, "sdpa")
    found = packed_logits(packed, sequences)
    wanted = torch.cat([alone(input_ids=s[None], use_cache=False).logits[0] for s in sequences])
    torch.testing.assert_close(found, wanted, rtol=0, atol=log_prob_error(alone, sequences))
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    size = torch.cat([p.grad.flatten() for p in alone.parameters() if p.grad is not None]).norm()
    for (name, a), b in zip(packed.named_parameters(), alone.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        floor = 0.01 * size  # the query gradient of a one-token sequence is only rounding error
        error = (a.grad - b.grad).norm() / torch.maximum(b.grad.norm(), floor)
        assert error < RELATIVE_ERROR, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("short", [0, 512])
@pytest.mark.parametrize("responses", [(3, 1, 7), (2, 60, 1)])
def test_a_shared_prompt_is_packed_once_with_the_gradients_of_all(monkeypatch, responses, short):
    monkeypatch.setattr(packed_attention, "SHORT", short)
    prompt, lengths = 9, [9 + r for r in responses]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 64, (prompt + sum(responses),), generator=generator)
    starts = torch.tensor([prompt, *responses[:-1]]).cumsum(0)
    spans = list(zip(starts, responses, strict=True))
    own = [torch.cat([torch.arange(prompt), start + torch.arange(response)]) for start, response in spans]
    shared, alone = make_model(2, NAME), make_model(2, "sdpa")
    found = shared(
        input_ids=ids[None],
        position_ids=torch.cat([torch.arange(prompt), *(prompt + torch.arange(r) for r in responses)])[None],
        use_cache=False,
        packed=PackedLayout.of_packed(torch.cat(own).numpy(), lengths, CPU),
    ).logits[0]
    for tokens, (start, response) in zip(own, spans, strict=True):
        weights = torch.randn(response, 64, generator=generator)
        wanted = alone(input_ids=ids[tokens][None], use_cache=False).logits[0]
        torch.testing.assert_close(found[tokens], wanted, rtol=0, atol=log_prob_error(alone, [ids[tokens]]))
        (wanted[prompt:] * weights).sum().backward()
        (found[start : start + response] * weights).sum().backward(retain_graph=True)
    for (name, a), b in zip(shared.named_parameters(), alone.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= RELATIVE_ERROR * b.grad.norm(), name


@pytest.mark.parametrize("short", [0, 512])
def test_values_may_be_narrower_than_queries(monkeypatch, short):
    """As in multi-head latent attention."""
    monkeypatch.setattr(packed_attention, "SHORT", short)
    lengths = (7, 3, 12)
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 12), (2, 12), (2, 8))  # heads and width of queries, keys and values
    q, k, v = (torch.randn(1, heads, sum(lengths), width, generator=generator) for heads, width in shapes)
    layout = PackedLayout.of_packed(np.arange(sum(lengths)), lengths, CPU)
    found, _ = packed_attention.packed_attention(torch.nn.Identity(), q, k, v, None, packed=layout, scaling=0.3)
    parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    wanted = [
        torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True, scale=0.3, enable_gqa=True)
        for part in parts
    ]
    assert found.shape == (1, sum(lengths), 4, 8)
    torch.testing.assert_close(found, torch.cat(wanted, 2).transpose(1, 2), rtol=0, atol=1e-5)


def plain_attention(q, k, v, scaling, visible):
    """Return softmax(q k) v of all rows at once: products in the dtype of q, the softmax in fp32."""
    rows, heads, length, width = q.shape
    groups = heads // k.shape[1]
    scores = (q.reshape(rows, k.shape[1], groups * length, width) @ k.transpose(-1, -2)).float() * scaling
    shares = scores.masked_fill(~visible.repeat(1, 1, groups, 1), -torch.inf).softmax(-1)
    return (shares.to(v.dtype) @ v).reshape(rows, heads, length, v.shape[-1])


@pytest.mark.parametrize("each_row_has_a_mask", [False, True])
@pytest.mark.parametrize("rows_at_a_time", [1, 2, 5])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_in_half_precision_a_few_rows_at_a_time_give_the_same_bits(
    monkeypatch, kv_heads, rows_at_a_time, each_row_has_a_mask
):
    rows, heads, queries, keys, width = 5, 3, 6, 8, 16
    monkeypatch.setattr(cached_attention, "CACHED_BYTES", 4 * rows_at_a_time * heads * queries * keys)
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, queries, width), (kv_heads, keys, width), (kv_heads, keys, 12), (heads, queries, 12)]
    *inputs, weights = (torch.randn(rows, *shape, generator=generator).bfloat16() for shape in shapes)
    first = torch.arange(rows) % 3 if each_row_has_a_mask else torch.tensor([2])
    visible = (torch.arange(keys) <= first[:, None, None] + torch.arange(queries)[:, None])[:, None]
    results = []
    for attend in (cached_attention.cached_attention, plain_attention):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = attend(*leaves, 0.3, visible)
        (out * weights).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for cached, plain in zip(*results, strict=True):
        assert torch.equal(cached, plain)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_layout_places_each_token_once_with_at_most_half_padding(lengths):
    layout = PackedLayout.of_packed(np.arange(sum(lengths)), lengths, CPU)
    placed = torch.cat([rows.tokens for rows in layout.rows])
    assert sorted(placed.tolist()) == list(range(sum(lengths)))
    for rows in layout.rows:
        cells = rows.keys
        assert torch.equal(cells, rows.queries) and rows.visible is None
        assert cells.numel() == rows.key_shape[0] * rows.key_shape[1] <= 2 * len(rows.tokens)
        assert torch.equal(cells[rows.to_packed], rows.tokens)
        assert (cells == sum(lengths)).sum() == cells.numel() - len(rows.tokens)


def test_sliding_windows_are_refused():
    x = torch.zeros(1, 1, 2, 8)
    layout = PackedLayout.of_packed(np.arange(2), [2], CPU)
    with pytest.raises(ValueError, match="--train-backend"):
        packed_attention.packed_attention(
            torch.nn.Identity(), x, x, x, None, packed=layout, scaling=1.0, sliding_window=4
        )
