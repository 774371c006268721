"""Give attributes of an object, a class or a module other values for the length of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def set_within(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of ``owner`` within the block. For a class or a module, not in several threads at once."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
