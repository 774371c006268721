"""Chunked log-probs and entropy, and their gradients, against the naive computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import rounding_error

from miles.objective import token_log_probs
from miles.objective.token_log_probs import chunked_log_probs
from miles.types.replay import TokenSets
from miles.types.support import Support
from miles.types.train_batch import SharedLogits


def inputs(rows: int, dtype: torch.dtype, bias: bool = True, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden [rows, 6], weight [11, 6] and perhaps bias [11], to differentiate, and targets [rows]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, 6), (11, 6), (11,)][: 3 if bias else 2]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    return tensors, torch.randint(11, (rows,), generator=generator)


def naive(hidden, weight, bias, targets, temperature):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    log_p = torch.log_softmax(logits / (temperature or 1.0), -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@settings(max_examples=40)
@given(
    rows=st.integers(0, 9),
    chunk=st.sampled_from([-1, 1, 2, 4, 100]),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    bias=st.booleans(),
    uses=st.sampled_from([(True, True), (True, False), (False, True)]),
)
def test_values_and_gradients_are_those_of_the_naive_computation(rows, chunk, temperature, bias, uses):
    tensors, targets = inputs(rows, torch.float64, bias)
    hidden, weight, offset = [*tensors, None][:3]
    weigh = torch.randn(2, rows, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def gradients(outputs):
        total = sum((o * w).sum() for o, w, used in zip(outputs, weigh, uses, strict=True) if used)
        return torch.autograd.grad(total, tensors)

    chunked = chunked_log_probs(hidden, weight, targets, temperature, chunk, offset, with_entropy=True)
    expected = naive(hidden, weight, offset, targets, temperature)
    torch.testing.assert_close(chunked, expected)
    torch.testing.assert_close(gradients(chunked), gradients(expected))


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(0, 9),
    chunk=st.sampled_from([-1, 1, 2, 100]),
    uses=st.sampled_from([(True, True), (True, False), (False, True)]),
)
def test_over_a_support_other_logits_have_no_part(seed, rows, chunk, uses):
    """Values and gradients equal a softmax over the set's own logits."""
    tensors, targets = inputs(rows, torch.float64, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    masks = torch.rand(rows, 11, generator=generator) < torch.rand(rows, 1, generator=generator)
    masks[torch.arange(rows), targets] = True
    support = Support.of(TokenSets.of(11, [row.nonzero()[:, 0].numpy() for row in masks]), torch.device("cpu"))
    results = chunked_log_probs(*tensors[:2], targets, 0.7, chunk, tensors[2], with_entropy=True, support=support)
    log_probs, entropies = [], []
    logits = torch.nn.functional.linear(*tensors) / 0.7
    for row, mask, target in zip(logits, masks, targets, strict=True):
        log_p = torch.log_softmax(row[mask], -1)
        log_probs.append(log_p[mask[:target].sum()])
        entropies.append(-(log_p.exp() * log_p).sum())
    expected = [torch.stack(column) if column else logits.sum(-1) for column in (log_probs, entropies)]
    torch.testing.assert_close(list(results), expected)

    def gradients(outputs):
        return torch.autograd.grad(sum((o * (2 + i)).sum() for i, o in enumerate(outputs) if uses[i]), tensors)

    torch.testing.assert_close(gradients(results), gradients(expected))


def test_gradcheck():
    tensors, targets = inputs(5, torch.float64)
    assert torch.autograd.gradcheck(
        lambda hidden, weight, bias: chunked_log_probs(hidden, weight, targets, 0.7, 2, bias, with_entropy=True),
        tensors,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_fp32_and_gradients_of_the_inputs_dtype(dtype):
    tensors, targets = inputs(7, dtype, bias=False)
    log_probs, entropy = chunked_log_probs(*tensors, targets, 1.0, 3, with_entropy=True)
    assert log_probs.dtype == entropy.dtype == torch.float32
    (log_probs.sum() + entropy.sum()).backward()
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = naive(*exact, None, targets, 1.0)
    (expected[0].sum() + expected[1].sum()).backward()
    # Sums of the product and of the softmax, and of 7 rows in a gradient; logits are up to 10.
    fp32 = dict(rtol=0.0, atol=rounding_error(6 + 11 + 7, 10.0))
    tolerance = fp32 if dtype == torch.float32 else dict(rtol=0.05, atol=0.05)
    torch.testing.assert_close(log_probs.double(), expected[0], **tolerance)
    for tensor, reference in zip(tensors, exact, strict=True):
        assert tensor.grad.dtype == dtype
        torch.testing.assert_close(tensor.grad.double(), reference.grad, **tolerance)


def test_entropy_only_when_asked():
    tensors, targets = inputs(3, torch.float32)
    log_probs, entropy = chunked_log_probs(*tensors[:2], targets, 1.0, 2, tensors[2])
    assert entropy is None and log_probs.requires_grad


def test_large_logits_do_not_overflow():
    hidden = torch.tensor([[1000.0, -1000.0]], requires_grad=True)
    log_probs, entropy = chunked_log_probs(hidden, torch.eye(2), torch.tensor([0]), 1.0, -1, with_entropy=True)
    (log_probs + entropy).sum().backward()
    assert log_probs.item() == entropy.item() == 0.0 and not hidden.grad.any()


def test_frozen_head_gets_no_gradient():
    tensors, targets = inputs(3, torch.float32, bias=False)
    hidden, weight = tensors[0], tensors[1].detach()
    chunked_log_probs(hidden, weight, targets, 1.0, 2)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


@pytest.mark.parametrize("chunk", [0, -2])
def test_chunk_size_is_checked(chunk):
    tensors, targets = inputs(2, torch.float32, bias=False)
    with pytest.raises(AssertionError, match="--log-probs-chunk-size"):
        chunked_log_probs(*tensors, targets, 1.0, chunk)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [-1, 3])
def test_an_fp32_head_computes_log_probs_of_bf16_inputs_as_float64_does(bias, chunk):
    """--fp32-lm-head: logits are not rounded to bf16, which alone changes log-probs by a hundred times as much."""
    tensors, targets = inputs(40, torch.bfloat16, bias)
    hidden, weight, offset = [*tensors, None][:3]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = naive(*[*exact, None][:3], targets, 0.7)
    columns = chunked_log_probs(hidden, weight, targets, 0.7, chunk, offset, with_entropy=True, fp32=True)
    rounded = chunked_log_probs(hidden, weight, targets, 0.7, chunk, offset, with_entropy=True)
    size = float((exact[0].abs() @ exact[1].abs().t()).max()) / 0.7
    bound = rounding_error(6 + 11, size)  # the sums of the product and of the softmax
    for column, wanted, coarse in zip(columns, expected, rounded, strict=True):
        assert column.dtype == torch.float32
        assert (column.double() - wanted).abs().max() < bound
        assert (coarse.double() - wanted).abs().max() > 30 * bound
    (columns[0].sum() + columns[1].sum()).backward()
    (expected[0].sum() + expected[1].sum()).backward()
    for tensor, reference in zip(tensors, exact, strict=True):
        assert tensor.grad.dtype == torch.bfloat16
        # One rounding to bf16, of the result: half a unit in the last of 8 digits.
        close = 2.0**-8 * reference.grad.abs() + 100 * bound
        assert ((tensor.grad.double() - reference.grad).abs() <= close).all()


def test_an_fp32_head_changes_nothing_in_fp32():
    tensors, targets = inputs(9, torch.float32)
    log_probs = [chunked_log_probs(*tensors[:2], targets, 1.0, 4, tensors[2], fp32=fp32)[0] for fp32 in (False, True)]
    assert torch.equal(*log_probs)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9),
    cached_rows=st.integers(1, 4),
    chunk=st.sampled_from([-1, 3, 100]),
    temperature=st.sampled_from([0.5, 1.0]),
    bias=st.booleans(),
)
def test_in_half_precision_a_few_rows_at_a_time_give_the_same_bits(rows, cached_rows, chunk, temperature, bias):
    def results(cached_bytes):
        tensors, targets = inputs(rows, torch.bfloat16, bias)
        hidden, weight, offset = [*tensors, None][:3]
        before, token_log_probs.CACHED_BYTES = token_log_probs.CACHED_BYTES, cached_bytes
        try:
            outputs = chunked_log_probs(hidden, weight, targets, temperature, chunk, offset, with_entropy=True)
            (outputs[0].sum() + 0.1 * outputs[1].sum()).backward()
        finally:
            token_log_probs.CACHED_BYTES = before
        return [*outputs, hidden.grad, weight.grad]  # the bias is summed over rows, whose order differs

    for few, all_rows in zip(results(4 * 11 * cached_rows), results(0), strict=True):
        assert torch.equal(few, all_rows)


@settings(max_examples=40, deadline=None)
@given(
    row=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    chunk=st.sampled_from([-1, 1, 2, 100]),
    dtype=st.sampled_from([torch.float64, torch.bfloat16]),
    uses=st.sampled_from([(True, True), (True, False), (False, True)]),
)
def test_a_shared_row_of_logits_is_that_of_each_of_its_readers(row, chunk, dtype, uses):
    tokens, row = torch.tensor(row).unique(return_inverse=True)
    tensors, _ = inputs(len(tokens), dtype)
    targets = torch.randint(11, (len(row),), generator=torch.Generator().manual_seed(1))
    ends = np.cumsum([0, *torch.bincount(row).tolist()])
    shared = SharedLogits(tokens, row, row.argsort(stable=True), ends)

    def results(hidden, shared):
        outputs = chunked_log_probs(
            hidden, tensors[1], targets, 0.7, chunk, tensors[2], with_entropy=True, shared=shared
        )
        total = sum((o * (2 + i)).sum() for i, o in enumerate(outputs) if uses[i])
        return [*outputs, *torch.autograd.grad(total, tensors)]

    tolerance = {} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.05}
    for actual, expected in zip(results(tensors[0], shared), results(tensors[0][row], None), strict=True):
        torch.testing.assert_close(actual, expected, **tolerance)


def test_a_single_chunk_keeps_its_logits_for_one_backward_pass(monkeypatch):
    """A second backward pass over the same graph computes them again, as the first has changed them."""
    products = []
    product = token_log_probs.head_logits
    monkeypatch.setattr(token_log_probs, "head_logits", lambda *given: products.append(1) or product(*given))
    for dtype in (torch.float64, torch.bfloat16):
        for chunk, counts in ((-1, (1, 1, 2)), (4, (2, 4, 6))):
            tensors, targets = inputs(7, dtype)
            products.clear()
            outputs = chunked_log_probs(*tensors[:2], targets, 0.7, chunk, tensors[2], with_entropy=True)
            totals = [len(products)]
            gradients = []
            for _ in range(2):
                gradients.append(torch.autograd.grad(sum(o.sum() for o in outputs), tensors, retain_graph=True))
                totals.append(len(products))
            assert tuple(totals) == counts
            assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
