"""Encode which elements of a tensor have changed, and what they are now: the form of a weight delta.

After an optimizer step with a small learning rate most bf16 weights are what they were, because the step is less than
half of their last place. Elements are compared and copied as bits, so NaNs, negative zeros and every dtype are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GAPS, BITMAP, WHOLE = "gaps", "bitmap", "whole"


@dataclass(frozen=True)
class TensorChange:
    """Hold the changed elements of one tensor.

    Attributes:
        form: How ``places`` says which elements they are. ``gaps``: the distance of each from the one before it, and of
            the first from the start. ``bitmap``: one bit per element. ``whole``: all elements; ``places`` is empty.
        places: [changed] unsigned integers, or [ceil(elements / 8)] bytes.
        values: [changed] their new bits, as unsigned integers of the element's size.
    """

    form: str
    places: np.ndarray
    values: np.ndarray

    @property
    def nbytes(self) -> int:
        """The size of both arrays."""
        return self.places.nbytes + self.values.nbytes


def bits_of(data: np.ndarray, itemsize: int) -> np.ndarray:
    """View contiguous bytes as unsigned integers of ``itemsize`` bytes (1, 2, 4 or 8), one per element."""
    return data.view(f"u{itemsize}")


def encode(old: np.ndarray, new: np.ndarray) -> TensorChange | None:
    """Return what has changed from ``old`` to ``new``, in the shortest form; None if nothing has.

    Args:
        old: [elements] bits of the tensor before.
        new: [elements] bits of the tensor now, of the same dtype.
    """
    assert old.shape == new.shape and old.dtype == new.dtype, "a tensor that has another shape or dtype is sent whole"
    differs = old != new
    places = np.flatnonzero(differs)
    if not len(places):
        return None
    gaps = np.diff(places, prepend=0)
    gaps = gaps.astype(np.min_scalar_type(gaps.max()))
    bitmap_bytes = -(-len(new) // 8)
    if min(gaps.nbytes, bitmap_bytes) + len(places) * new.itemsize >= new.nbytes:
        return TensorChange(WHOLE, np.empty(0, np.uint8), new)
    values = new[places]
    if gaps.nbytes <= bitmap_bytes:
        return TensorChange(GAPS, gaps, values)
    return TensorChange(BITMAP, np.packbits(differs), values)


def apply(change: TensorChange, target: np.ndarray) -> None:
    """Write the changed elements into ``target`` [elements], which holds the old bits.

    Raises:
        ValueError: If the change belongs to no tensor of this size and dtype. ``target`` is as it was.
    """
    if change.values.dtype != target.dtype:
        raise ValueError(f"elements of {change.values.dtype} do not fit {target.dtype}")
    target[_places(change, len(target))] = change.values


def inverse(change: TensorChange, old: np.ndarray) -> TensorChange:
    """Return the change that leads back to ``old`` [elements]."""
    return TensorChange(change.form, change.places, old[_places(change, len(old))].copy())


def _places(change: TensorChange, count: int) -> np.ndarray | slice:
    """Return the indices of the changed elements of ``count``. Raises ``ValueError`` as ``apply`` does."""
    match change.form:
        case "gaps":
            places = np.cumsum(change.places, dtype=np.int64)
        case "bitmap":
            if change.places.dtype != np.uint8 or len(change.places) != -(-count // 8):
                raise ValueError(f"a bitmap of {change.places.nbytes} bytes does not fit {count} elements")
            places = np.flatnonzero(np.unpackbits(change.places)[:count])
        case "whole":
            if len(change.values) != count:
                raise ValueError(f"{len(change.values)} elements do not fit {count}")
            return slice(None)
        case unknown:
            raise ValueError(f"{unknown!r} is no form of a change")
    if len(places) != len(change.values):
        raise ValueError(f"{len(places)} places for {len(change.values)} values")
    if len(places) and (places[0] < 0 or places[-1] >= count or (np.diff(places) <= 0).any()):
        raise ValueError(f"places outside of {count} elements, or out of order")
    return places
