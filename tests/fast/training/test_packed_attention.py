"""A model gives the same results on packed sequences as on each sequence alone, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_llama import tiny_llama
from tolerance import RELATIVE_ERROR, attention_error, log_prob_error
from transformers import LlamaForCausalLM

from miles.training import packed_attention
from miles.training.packed_attention import NAME, PackedLayout
from miles.types.parallel import padded_length, zigzag_chunks

CPU = torch.device("cpu")


def make_model(kv_heads: int, attention: str) -> LlamaForCausalLM:
    fields = dict(num_key_value_heads=kv_heads, initializer_range=0.2, attn_implementation=attention)
    return tiny_llama(seed=3, **fields).train()


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
    logits = packed_logits(packed, sequences)
    wanted = torch.cat([alone(input_ids=s[None], use_cache=False).logits[0] for s in sequences])
    torch.testing.assert_close(logits, wanted, rtol=0, atol=log_prob_error(alone, sequences))
    (logits * weights).sum().backward()
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
    logits = shared(
        input_ids=ids[None],
        position_ids=torch.cat([torch.arange(prompt), *(prompt + torch.arange(r) for r in responses)])[None],
        use_cache=False,
        packed=PackedLayout.of_packed(torch.cat(own).numpy(), lengths, CPU),
    ).logits[0]
    for tokens, (start, response) in zip(own, spans, strict=True):
        weights = torch.randn(response, 64, generator=generator)
        wanted = alone(input_ids=ids[tokens][None], use_cache=False).logits[0]
        torch.testing.assert_close(logits[tokens], wanted, rtol=0, atol=log_prob_error(alone, [ids[tokens]]))
        (wanted[prompt:] * weights).sum().backward()
        (logits[start : start + response] * weights).sum().backward(retain_graph=True)
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
    output, _ = packed_attention.packed_attention(torch.nn.Identity(), q, k, v, None, packed=layout, scaling=0.3)
    parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    wanted = [
        torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True, scale=0.3, enable_gqa=True)
        for part in parts
    ]
    assert output.shape == (1, sum(lengths), 4, 8)
    error = attention_error(q, k, v, scaling=0.3, terms=max(lengths))
    torch.testing.assert_close(output, torch.cat(wanted, 2).transpose(1, 2), rtol=0, atol=error)


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_in_half_precision_a_few_rows_at_a_time_give_the_bits_of_all_rows(monkeypatch, kv_heads):
    heads, width, lengths, prompt = 3, 16, [8] * 5 + [7, 9, 21, 5], 4
    index = np.concatenate([np.r_[:prompt, 100 * row + prompt : 100 * row + n] for row, n in enumerate(lengths, 1)])
    index = np.unique(index, return_inverse=True)[1]
    tokens = int(index.max()) + 1
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, tokens, width), (kv_heads, tokens, width), (kv_heads, tokens, 12), (heads, tokens, 12)]
    *inputs, weights = (torch.randn(1, *shape, generator=generator).bfloat16() for shape in shapes)
    results = []
    for rows_at_a_time in (1, 2, 1000):
        monkeypatch.setattr(packed_attention, "CACHED_BYTES", 4 * rows_at_a_time * heads * 9 * 9)
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        layout = PackedLayout.of_packed(index, lengths, CPU)
        out, _ = packed_attention.packed_attention(torch.nn.Identity(), *leaves, None, packed=layout, scaling=0.3)
        (out.transpose(1, 2) * weights).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    *parts, whole = results
    assert all(torch.equal(mine, theirs) for part in parts for mine, theirs in zip(part, whole, strict=True))


def test_a_key_of_many_samples_sums_their_gradients_in_fp32():
    """In bf16 a sum stops to grow at 256 summands."""
    samples = 1000
    index = np.stack([np.zeros(samples, int), 1 + np.arange(samples)], 1).ravel()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, samples + 1, 16, generator=generator).bfloat16().requires_grad_() for _ in range(3))
    layout = PackedLayout.of_packed(index, [2] * samples, CPU)
    out, _ = packed_attention.packed_attention(torch.nn.Identity(), q, k, v, None, packed=layout, scaling=0.3)
    out.sum().backward()
    scores = torch.stack([(q[0, 0, 1:] * k[0, 0, :1]).sum(-1), (q[0, 0, 1:] * k[0, 0, 1:]).sum(-1)], -1)
    wanted = 1 + (scores.double() * 0.3).softmax(-1)[:, 0].sum()  # of each coordinate: the shares of the first key
    assert torch.allclose(v.grad[0, 0, 0].double(), wanted, rtol=1e-2)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=12))
def test_a_token_that_samples_share_is_a_query_once(sequences):
    """It attends to its whole prefix, in whichever row it is."""
    prefixes = sorted({tuple(tokens[:end]) for tokens in sequences for end in range(1, len(tokens) + 1)})
    number = {prefix: place for place, prefix in enumerate(prefixes)}
    index = [number[tuple(tokens[:end])] for tokens in sequences for end in range(1, len(tokens) + 1)]
    layout = PackedLayout.of_packed(np.array(index), [len(tokens) for tokens in sequences], CPU)
    queries = torch.cat([rows.queries[rows.queries < len(prefixes)] for rows in layout.rows])
    assert sorted(queries.tolist()) == list(range(len(prefixes)))
    for rows in layout.rows:
        length, width = rows.query_shape[1], rows.key_shape[1]
        visible = (
            torch.ones(length, width, dtype=torch.bool).tril()[None, None] if rows.visible is None else rows.visible
        )
        visible = visible.expand(rows.query_shape[0], 1, -1, -1)
        assert torch.equal(rows.queries[rows.to_packed], rows.tokens)
        assert torch.equal(rows.keys[rows.keys_to_packed], rows.tokens)
        for cell, token in zip(rows.to_packed.tolist(), rows.tokens.tolist(), strict=True):
            row, place = divmod(cell, length)
            seen = rows.keys.view(-1, width)[row][visible[row, 0, place]]
            assert seen.tolist() == [number[prefixes[token][:end]] for end in range(1, len(prefixes[token]) + 1)]


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


def reference_attention(q, k, v, window, sinks):
    """Attend in one sequence, [heads, T, D], all scores at once."""
    length, groups = q.shape[1], q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(groups, 0) for x in (k, v))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (window or length))
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ v
    return torch.cat([scores, sinks[:, None, None].expand(-1, length, 1)], -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize(
    ("window", "with_sinks", "dtype"),
    [
        (2, False, torch.float32),
        (5, False, torch.bfloat16),
        (64, False, torch.float32),
        (None, True, torch.float32),
        (None, True, torch.bfloat16),
        (5, True, torch.float32),
        (64, True, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("short", [0, 512])
def test_windows_and_sinks_equal_a_float64_reference(monkeypatch, short, window, with_sinks, dtype):
    """Of sequences without and with a shared prompt, shorter and longer than the window, forward and backward."""
    monkeypatch.setattr(packed_attention, "SHORT", short)
    lengths, prompt = (3, 70, 1, 21, 27), 19
    index = np.arange(sum(lengths))
    index[-27 : -27 + prompt] = index[-48 : -48 + prompt]
    index = np.unique(index, return_inverse=True)[1]
    tokens = int(index.max()) + 1
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(heads, tokens, width, generator=generator) for heads, width in ((4, 12), (2, 12), (2, 8))]
    leaves += [3 * torch.randn(4, generator=generator)] * with_sinks
    leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    q, k, v, *sinks = leaves
    layout = PackedLayout.of_packed(index, lengths, CPU)
    options = dict(packed=layout, scaling=0.3, sliding_window=window, s_aux=sinks[0] if sinks else None)
    output, _ = packed_attention.packed_attention(torch.nn.Identity(), q[None], k[None], v[None], None, **options)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    parts = [
        reference_attention(*(x[:, own] for x in exact[:3]), window, exact[3] if sinks else None)
        for own in np.split(index, np.cumsum(lengths)[:-1])
    ]
    wanted = torch.cat(parts, 1)[:, np.unique(index, return_index=True)[1]]
    weights = torch.randn(4, tokens, 8, generator=generator)
    results = zip(
        (output[0].transpose(0, 1), *torch.autograd.grad((output[0].transpose(0, 1) * weights).sum(), leaves)),
        (wanted, *torch.autograd.grad((wanted * weights).sum(), exact)),
        strict=True,
    )
    for mine, theirs in results:
        error = (mine - theirs).norm() / theirs.norm()
        assert error < (2e-2 if dtype == torch.bfloat16 else RELATIVE_ERROR)


@dataclass(frozen=True)
class Sharing:
    """A rank of several that share sequences, where all ranks are in one process."""

    size: int
    rank: int
    everyone: list[torch.Tensor]

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        assert torch.equal(mine, self.everyone[self.rank])
        return torch.cat(self.everyone)


@pytest.mark.parametrize("window", [3, 9, 40])
@pytest.mark.parametrize("short", [0, 512])
def test_ranks_that_share_sequences_see_the_same_windows(monkeypatch, short, window):
    monkeypatch.setattr(packed_attention, "SHORT", short)
    ranks, lengths = 2, (32, 5, 61)
    padded = [padded_length(length, ranks) for length in lengths]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, sum(padded), 8, generator=generator) for _ in range(3))
    parts = zip(*(x.split(padded, 1) for x in (q, k, v)), strict=True)
    wanted = torch.cat([reference_attention(*part, window, None) for part in parts], 1)
    # Each rank's tokens, by their position in all sequences, and the place of each position among all ranks' tokens.
    own = []
    for rank in range(ranks):
        chunks = []
        for start, length in zip(np.cumsum(padded) - padded, padded, strict=True):
            for chunk in zigzag_chunks(ranks, rank):
                size = length // (2 * ranks)
                chunks.append(start + chunk * size + np.arange(size))
        own.append(np.concatenate(chunks))
    index = np.argsort(np.concatenate(own))
    everyone = [torch.cat([k, v], -1)[:, mine].transpose(0, 1) for mine in own]
    error = attention_error(q, k, v, scaling=0.3, terms=window)
    for rank, mine in enumerate(own):
        context = Sharing(ranks, rank, everyone)
        layout = PackedLayout.of_packed(index, lengths, CPU, context)
        options = dict(packed=layout, scaling=0.3, sliding_window=window)
        inputs = (x[:, mine][None] for x in (q, k, v))
        output, _ = packed_attention.packed_attention(torch.nn.Identity(), *inputs, None, **options)
        torch.testing.assert_close(output[0].transpose(0, 1), wanted[:, mine], rtol=0, atol=error)


def test_rows_of_a_window_grow_with_the_tokens_and_not_with_their_square():
    window, length = 16, 4000
    layout = PackedLayout.of_packed(np.arange(length), [length], CPU)
    rows = layout.rows_within(window)
    assert sum(part.keys.numel() for part in rows) < 2 * length + 4 * window
    assert all(part.visible is None or part.visible.numel() < 2 * window**2 for part in rows)
    assert layout.rows_within(window) is rows


def test_capped_scores_are_refused():
    x = torch.zeros(1, 1, 2, 8)
    layout = PackedLayout.of_packed(np.arange(2), [2], CPU)
    with pytest.raises(ValueError, match="--train-backend"):
        packed_attention.packed_attention(torch.nn.Identity(), x, x, x, None, packed=layout, scaling=1.0, softcap=50.0)
