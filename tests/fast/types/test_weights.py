"""Buckets of weights, and their transfer between processes."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.types.weights import WeightChunk, in_chunks, pack, unpack


@given(st.lists(st.integers(0, 20), max_size=15), st.integers(1, 120))
def test_chunks_keep_order_and_size(sizes, bucket_bytes):
    weights = [(f"w{i}", torch.full((n,), float(i))) for i, n in enumerate(sizes)]
    chunks = list(in_chunks(iter(weights), bucket_bytes))
    items = [item for chunk in chunks for item in chunk.tensors.items()]
    assert [name for name, _ in items] == [name for name, _ in weights]
    assert all(a is b for (_, a), (_, b) in zip(items, weights, strict=True))
    totals = [sum(t.nbytes for t in chunk.tensors.values()) for chunk in chunks]
    for chunk, total in zip(chunks, totals, strict=True):
        assert chunk.tensors
        assert total <= bucket_bytes or sum(t.nbytes > 0 for t in chunk.tensors.values()) == 1
    for total, following in zip(totals, chunks[1:], strict=False):
        assert total + next(iter(following.tensors.values())).nbytes > bucket_bytes, "a chunk was closed too early"


def test_chunks_are_made_as_they_are_read():
    def weights():
        yield "a", torch.zeros(4)
        yield "b", torch.zeros(4)
        raise AssertionError("read further than the first chunk needs")

    assert list(next(in_chunks(weights(), bucket_bytes=16)).tensors) == ["a"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5,), (2, 3, 4)])
def test_round_trip(dtype, shape):
    tensor = (torch.randn(shape) * 100).to(dtype)
    sent = pickle.loads(pickle.dumps(pack(WeightChunk({"w": tensor}))))
    result = unpack(sent).tensors["w"]
    assert result.dtype == dtype and result.shape == shape and torch.equal(result, tensor)


def test_a_transposed_weight_arrives_in_logical_order():
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(unpack(pack(WeightChunk({"w": tensor}))).tensors["w"], tensor)


@pytest.mark.filterwarnings("error")
def test_read_only_bytes_are_read():
    packed = pack(WeightChunk({"w": torch.ones(3)}))
    packed.entries["w"][2].flags.writeable = False
    assert unpack(packed).tensors["w"].tolist() == [1, 1, 1]
