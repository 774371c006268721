"""Draws follow the requested distribution and depend only on their own row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import DOUBLE_ERROR, log_softmax_error

from miles.engine.base import SamplingParams
from miles.engine.embedded.sampling import RowSampling, sample, seeded_uniforms

CPU = torch.device("cpu")


def draw(logits, params, uniforms):
    return sample(logits, RowSampling.of(params, logits.shape[1], CPU), uniforms)


def many_draws(logits, params, count=4096):
    """Draw with stratified uniforms: each token's frequency is within 1 / count of its probability."""
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, log_probs, _ = draw(logits.expand(count, -1), [params] * count, uniforms)
    return torch.bincount(tokens, minlength=logits.shape[-1]).double() / count, log_probs, tokens


@settings(max_examples=15)
@given(st.integers(0, 2**31), st.sampled_from([3, 256, 300, 700]), st.sampled_from([0.3, 1.0, 2.5]))
def test_frequencies_are_the_softmax_and_log_probs_its_log(seed, vocab, temperature):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2
    frequency, log_probs, tokens = many_draws(logits, SamplingParams(1, temperature))
    expected = torch.log_softmax(logits.double() / temperature, -1)
    assert (frequency - expected.exp()).abs().max() <= 1.01 / 4096
    error = log_softmax_error(logits / temperature)
    torch.testing.assert_close(log_probs.double(), expected[tokens], atol=error, rtol=0)


@settings(max_examples=15)
@given(st.integers(0, 2**31), st.integers(1, 20), st.floats(0.05, 1.0))
def test_top_k_and_top_p_keep_the_heaviest(seed, top_k, top_p):
    logits = torch.randn(300, generator=torch.Generator().manual_seed(seed)) * 2
    frequency, log_probs, tokens = many_draws(logits, SamplingParams(1, 1.0, top_p, top_k))
    probs, order = logits.double().softmax(-1).sort(descending=True)
    probs = torch.where(torch.arange(300) < top_k, probs, 0) / probs[:top_k].sum()
    nucleus = torch.where(probs.cumsum(-1) - probs < top_p - DOUBLE_ERROR, probs, 0)
    expected = torch.zeros(300, dtype=torch.double).index_copy(0, order, nucleus / nucleus.sum())
    assert (frequency - expected).abs().max() <= 2 / 4096
    wanted = torch.log_softmax(logits, -1)[tokens]
    torch.testing.assert_close(log_probs, wanted, atol=log_softmax_error(logits), rtol=0)


def test_top_p_reads_beyond_the_first_candidates():
    frequency, _, _ = many_draws(torch.linspace(0, 1e-3, 2000), SamplingParams(1, 1.0, 0.9), count=2048)
    assert (frequency > 0).sum() > 1500
    assert frequency[:150].sum() == 0


@settings(max_examples=15)
@given(
    st.integers(0, 2**31),
    st.sampled_from([-1, 1, 7, 2000]),
    st.sampled_from([1.0, 0.9, 0.3]),
    st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    st.sampled_from([0.05, 1.0]),
)
def test_the_support_is_what_is_drawn_from_and_log_probs_are_over_it(seed, top_k, top_p, min_p, spread):
    """Also if more tokens are kept than the first candidates, which small spreads of the logits need."""
    logits = torch.randn(1700, generator=torch.Generator().manual_seed(seed)) * spread
    params = SamplingParams(1, 0.7, top_p, top_k, min_p=min_p, returns_support=True)
    uniforms = torch.rand(3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    tokens, log_probs, supports = draw(logits.expand(3, -1), [params] * 3, uniforms)
    probs, order = (logits.double() / 0.7).softmax(-1).sort(descending=True)
    mask = torch.arange(1700) < (top_k if top_k > 0 else 1700)
    mask &= (probs * mask).cumsum(-1) - probs * mask < top_p * (probs * mask).sum()
    mask &= probs >= min_p * probs[0]
    if top_k in (-1, 2000) and top_p == 1 and min_p == 0:
        assert supports == {}
        return
    for row in range(3):
        pool = set(supports[row].tolist())
        assert tokens[row].item() in pool
        # fp32 may decide differently about a token at the edge of the nucleus.
        assert len(pool ^ set(order[mask].tolist())) <= 1
        expected = torch.log_softmax(logits.double()[sorted(pool)] / 0.7, -1)[sorted(pool).index(tokens[row].item())]
        assert log_probs[row].item() == pytest.approx(expected.item(), abs=log_softmax_error(logits / 0.7))


def test_supports_are_given_to_the_rows_that_ask():
    logits = torch.randn(4, 600, generator=torch.Generator().manual_seed(0))
    cut = SamplingParams(1, 1.0, 0.5, 5)
    params = [cut, SamplingParams(1, 1.0, 0.5, 5, returns_support=True), SamplingParams(1, returns_support=True), cut]
    _, log_probs, supports = draw(logits, params, torch.full((4,), 0.3, dtype=torch.float64))
    assert list(supports) == [1]
    plain = draw(logits, [cut] * 4, torch.full((4,), 0.3, dtype=torch.float64)).log_probs
    assert log_probs[1] > plain[1] and torch.equal(log_probs[[0, 3]], plain[[0, 3]])


def test_rows_are_independent():
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(1, t, p, k)
        for t, p, k in ((0, 1, -1), (1, 1, -1), (0.7, 0.5, -1), (1, 1, 5), (2, 0.9, 9), (0, 0.1, 1))
    ]
    uniforms = torch.rand(6, dtype=torch.float64)
    tokens, log_probs, _ = draw(logits, params, uniforms)
    for i in range(6):
        token, log_prob, _ = draw(logits[i : i + 1], params[i : i + 1], uniforms[i : i + 1])
        assert token.item() == tokens[i]
        assert log_prob.item() == pytest.approx(log_probs[i].item(), abs=log_softmax_error(logits[i]))
    assert tokens[0] == logits[0].argmax()
    assert tokens[5] == logits[5].argmax()


def test_a_large_top_k_does_not_depend_on_the_other_rows():
    """``top_p`` is a share of the tokens that a row's own top-k keeps, also alongside a row without one."""
    logits = 0.05 * torch.randn(1700, generator=torch.Generator().manual_seed(0))
    large = SamplingParams(1, 1.0, 0.5, 1200, returns_support=True)
    uniforms = torch.full((2,), 0.9999, dtype=torch.float64)
    alone = draw(logits[None], [large], uniforms[:1])
    beside = draw(logits.expand(2, -1), [large, SamplingParams(1, 1.0, 0.3)], uniforms)
    assert len(beside.supports[0]) == len(alone.supports[0]) < 600
    assert beside.tokens[0] == alone.tokens[0]


@pytest.mark.parametrize("uniform", [0.0, math.nextafter(1.0, 0.0)])
def test_impossible_tokens_are_never_drawn(uniform):
    logits = torch.full((1, 600), -math.inf)
    logits[0, 300] = logits[0, 301] = 5.0
    token, log_prob, _ = draw(logits, [SamplingParams(1)], torch.tensor([uniform], dtype=torch.float64))
    assert token.item() == (300 if uniform == 0 else 301)
    assert log_prob.item() == pytest.approx(math.log(0.5))


def test_uniforms_repeat_by_seed_and_do_not_depend_on_the_count():
    assert seeded_uniforms(7, 5).tolist() == seeded_uniforms(7, 9)[:5].tolist()
    assert seeded_uniforms(7, 5).tolist() != seeded_uniforms(8, 5).tolist()


@pytest.mark.parametrize(
    ("params", "flag"),
    [
        (SamplingParams(0), "--rollout-max-response-len 0"),
        (SamplingParams(1, -1.0), "--rollout-temperature -1.0"),
        (SamplingParams(1, float("nan")), "--rollout-temperature nan"),
        (SamplingParams(1, 1.0, 0.0), "--rollout-top-p 0.0"),
        (SamplingParams(1, 1.0, 1.0, 0), "--rollout-top-k 0"),
        (SamplingParams(1, min_p=1.5), "--rollout-min-p 1.5"),
    ],
)
def test_values_outside_their_range_are_named(params, flag):
    with pytest.raises(ValueError, match=flag):
        params.check()
