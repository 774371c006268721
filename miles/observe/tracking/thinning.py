"""Keep metrics.jsonl within a bound (``--metrics-max-mb``): old rows get sparse, and the newest stay whole."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

from miles.base.host.disk_faults import naming_disk

FIRST = 20  # rows that are never dropped: health rules compare with the beginning of a run
TARGET = 0.75  # of the bound, after rows were dropped, so that this is done rarely

# A row is of the first kind whose metrics it has. Each kind is thinned apart: a row of rewards or of an evaluation may
# be one in many.
_KINDS = (b'"eval/', b'"rollout/', b"")


def thin(path: Path, most_bytes: int) -> None:
    """Drop rows until the file has at most ``TARGET`` of ``most_bytes``, if that is possible.

    Among the rows between the first and the newest quarter, every second of each kind is dropped, again and again. A
    long run that is thinned many times has the fewest rows from its early middle. The file is read in portions: it may
    be large.

    Raises:
        WriteFailed: The disk is full; the file is as it was.
    """
    lengths, kinds = _scan(path)
    kept: Sequence[int] = range(len(lengths))
    while sum(lengths[i] for i in kept) > TARGET * most_bytes:
        fewer = _halved(kept, kinds)
        if len(fewer) == len(kept):
            break
        kept = fewer
    new = path.with_name(f"{path.name}.new")
    with naming_disk(path, new):
        _copy(path, new, kept)
        new.replace(path)


def _scan(path: Path) -> tuple[array[int], bytearray]:
    """Return the bytes and the kind of each row."""
    lengths, kinds = array("q"), bytearray()
    with path.open("rb") as file:
        for line in file:
            lengths.append(len(line))
            kinds.append(next(number for number, name in enumerate(_KINDS) if name in line))
    return lengths, kinds


def _halved(rows: Sequence[int], kinds: bytearray) -> list[int]:
    """Return ``rows`` without every second row of each kind in the middle."""
    newest = max(FIRST, len(rows) - len(rows) // 4)
    seen = [0] * len(_KINDS)
    kept = [*rows[:FIRST]]
    for row in rows[FIRST:newest]:
        kind = kinds[row]
        if seen[kind] % 2 == 0:
            kept.append(row)
        seen[kind] += 1
    return [*kept, *rows[newest:]]


def _copy(path: Path, new: Path, rows: Iterable[int]) -> None:
    wanted = iter(rows)
    following = next(wanted, None)
    with path.open("rb") as old, new.open("wb") as file:
        for number, line in enumerate(old):
            if number == following:
                file.write(line)
                following = next(wanted, None)
