"""What counts as a repetition of the model's config."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config.megatron.rules import repeats


@given(st.floats(1e-12, 1e6))
def test_a_config_that_was_rounded_to_fp32_has_the_number_that_was_rounded(number):
    (rounded,) = struct.unpack("f", struct.pack("f", number))
    assert repeats(number, rounded)
    assert not repeats(number, number * (1 + 1e-6))


@pytest.mark.parametrize(
    ("value", "wanted", "same"),
    [(1, 1, True), (1, 2, False), ([1], 1, True), (1, [1, 1], True), (1, [1, 0], False), ("rope", "none", False)],
)
def test_values_and_lists_of_equal_entries(value, wanted, same):
    assert repeats(value, wanted) is same
