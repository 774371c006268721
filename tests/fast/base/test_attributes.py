"""Attributes that have other values within a block."""

from types import SimpleNamespace

import pytest

from miles.base.attributes import set_within


def test_values_are_back_at_the_end_of_the_block_also_after_an_error() -> None:
    owner = SimpleNamespace(a=1, b=2)
    with pytest.raises(RuntimeError), set_within(owner, a=3, b=4):
        assert (owner.a, owner.b) == (3, 4)
        raise RuntimeError
    assert (owner.a, owner.b) == (1, 2)


def test_an_attribute_that_is_not_there_changes_nothing() -> None:
    owner = SimpleNamespace(a=1)
    with pytest.raises(AttributeError), set_within(owner, a=3, missing=4):
        pass
    assert vars(owner) == {"a": 1}
