"""Changes of a tensor: applied to its old values, they give its new values, bit for bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.engine.weight_sync.deltas import BITMAP, GAPS, WHOLE, TensorChange, apply, encode

SHARES = [0.0, 1e-3, 0.01, 0.1, 0.5, 1.0]  # of the elements that change


def bits(random, count, itemsize):
    return np.frombuffer(random.bytes(count * itemsize), f"u{itemsize}").copy()


@given(st.integers(0, 2**32), st.sampled_from([0, 1, 7, 8, 300, 70_000]), st.sampled_from([1, 2, 4, 8]), st.data())
def test_a_change_turns_the_old_bits_into_the_new_ones(seed, count, itemsize, data):
    random = np.random.default_rng(seed)
    old = bits(random, count, itemsize)
    new = np.where(random.random(count) < data.draw(st.sampled_from(SHARES)), bits(random, count, itemsize), old)
    change = encode(old, new)
    assert (change is None) == (old == new).all()
    if change is not None:
        changed = int((old != new).sum())
        assert change.nbytes <= min(new.nbytes, -(-count // 8) + changed * itemsize)
        apply(change, old)
        assert (old == new).all()


@pytest.mark.parametrize(
    ("every", "form", "place"),
    [(1, WHOLE, "uint8"), (5, BITMAP, "uint8"), (200, GAPS, "uint8"), (1000, GAPS, "uint16")],
)
def test_the_shortest_form_is_chosen(every, form, place):
    old = np.zeros(100_000, np.uint16)
    new = old.copy()
    new[every - 1 :: every] = 1
    change = encode(old, new)
    assert (change.form, change.places.dtype) == (form, place)


GAP, VALUE = np.array([1, 2], np.uint8), np.array([5, 6], np.uint16)


@pytest.mark.parametrize(
    "change",
    [
        TensorChange(GAPS, GAP, VALUE.astype(np.uint32)),
        TensorChange(GAPS, GAP, VALUE[:1]),
        TensorChange(GAPS, np.array([1, 3], np.uint8), VALUE),  # element 4 of 4
        TensorChange(GAPS, np.array([1, 0], np.uint8), VALUE),
        TensorChange(GAPS, np.array([1, 2**64 - 1], np.uint64), VALUE),
        TensorChange(BITMAP, np.array([0b11100000], np.uint8), VALUE),
        TensorChange(BITMAP, np.array([0b11000000, 0], np.uint8), VALUE),
        TensorChange(BITMAP, np.array([0b11000000], np.uint16), VALUE),
        TensorChange(WHOLE, np.empty(0, np.uint8), VALUE),
        TensorChange("other", GAP, VALUE),
    ],
)
def test_a_change_of_another_tensor_is_refused_and_changes_nothing(change):
    target = np.arange(4, dtype=np.uint16)
    with pytest.raises(ValueError):
        apply(change, target)
    assert target.tolist() == [0, 1, 2, 3]
