"""samples.jsonl without reading it: any iteration by bisection, neighbours, and search in portions.

The rows are in the order of their iterations, so that an iteration is found with a few reads at any size of the file.
Each row names its iteration by ``rollout_id``, the last optimizer step of the iteration.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from miles.observe.tracking import jsonl

_STEP = re.compile(rb'\{"rollout_id": (\d+),')
_SEARCH_CHUNK = 1 << 23
_TAIL = 1 << 16

Row = dict[str, Any]


@dataclass(frozen=True)
class Iteration:
    """The stored rows of one iteration, named by ``step``, and the iterations around it (None: there is none)."""

    step: int
    rows: list[Row]
    first: int
    last: int
    previous: int | None
    next: int | None


@dataclass(frozen=True)
class Hit:
    """A row that a search found: its iteration, its position there, and the row."""

    step: int
    index: int
    row: Row


@dataclass(frozen=True)
class SearchPage:
    """Some hits. ``cursor`` continues the search; None: the end of the file is reached."""

    hits: list[Hit]
    cursor: int | None
    searched: float  # the share of the file that is behind the cursor


class SampleFile:
    """Reads a file of samples that may grow. Every call opens it again, so the file may be replaced.

    Raises:
        ValueError: From every call that meets a line that is not a sample; the message names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def iteration(self, step: int | None) -> Iteration | None:
        """Return the iteration ``step``, else the next stored one, else the last (also for None); None if none is."""
        if not self.path.is_file():
            return None
        with self.path.open("rb") as file:
            end = _end(file)
            if not end:
                return None
            first, last = self._step_at(file, 0), self._step_at(file, _line_before(file, end))
            wanted = last if step is None else min(step, last)
            begin = self._offset(file, wanted, end)
            found = self._step_at(file, begin)
            stop = self._offset(file, found + 1, end)
            file.seek(begin)
            lines = file.read(stop - begin).split(b"\n")[:-1]
            previous = self._step_at(file, _line_before(file, begin)) if begin else None
            following = self._step_at(file, stop) if stop < end else None
        rows = [self._parsed(line, begin) for line in lines]
        return Iteration(found, rows, first, last, previous, following)

    def cut(self, step: int) -> None:
        """Remove ``step`` and all later iterations, and an unfinished last line."""
        if not self.path.is_file():
            return
        with self.path.open("r+b") as file:
            file.truncate(self._offset(file, step, _end(file)))

    def search(self, text: str, cursor: int = 0, most: int = 50, seconds: float = 0.5) -> SearchPage:
        """Return rows whose prompt, response or label holds ``text`` in any case, from ``cursor`` on.

        It stops after ``most`` hits or after ``seconds``; at least one portion of the file is searched.
        """
        hits: list[Hit] = []
        until = time.monotonic() + seconds
        if not self.path.is_file():
            return SearchPage([], None, 1.0)
        # Bytes have cases in ASCII alone: rows that hold such a part of the text are read, and compared with all of it.
        parts = re.findall("[\\x00-\\x7f]+", json.dumps(text, ensure_ascii=False)[1:-1])
        needle = max(parts, key=len, default="").encode("ascii").lower()
        with self.path.open("rb") as file:
            end = _end(file)
            cursor = _line_after(file, cursor, end) if cursor else 0  # one of an older file may be inside a line
            while cursor < end and len(hits) < most and (not hits or time.monotonic() < until):
                for line, offset in _lines_with(file, needle, cursor, end):
                    cursor = offset + len(line) + 1
                    row = self._parsed(line, offset)
                    if _holds(row, text.lower()):
                        hits.append(self._hit(file, row, offset, end))
                        if len(hits) >= most:
                            break
                    if time.monotonic() > until:
                        break
                else:
                    cursor = _line_after(file, cursor + _SEARCH_CHUNK, end)
                if time.monotonic() > until:
                    break
        return SearchPage(hits, None if cursor >= end else cursor, cursor / end if end else 1.0)

    def _hit(self, file: BinaryIO, row: Row, offset: int, end: int) -> Hit:
        begin = self._offset(file, row["rollout_id"], end)
        file.seek(begin)
        return Hit(row["rollout_id"], file.read(offset - begin).count(b"\n"), row)

    def _offset(self, file: BinaryIO, step: int, end: int) -> int:
        """Return the offset of the first line of iteration ``step`` or later; ``end`` if there is none."""
        low, high = 0, end  # lines that start before low are earlier ones; those from high on are not
        while low < high:
            middle = (low + high) // 2
            start = low if middle == low else _line_after(file, middle, end)
            if start >= high:
                high = middle
            elif self._step_at(file, start) < step:
                file.seek(start)
                file.readline()
                low = file.tell()
            else:
                high = start
        return low

    def _step_at(self, file: BinaryIO, offset: int) -> int:
        file.seek(offset)
        if match := _STEP.match(file.read(40)):
            return int(match[1])
        file.seek(offset)
        step = self._parsed(file.readline().rstrip(b"\n"), offset).get("rollout_id")
        if not isinstance(step, int):
            raise ValueError(f"{self.path}: the row at byte {offset} has no rollout_id; remove the line or the file")
        return step

    def _parsed(self, line: bytes, offset: int) -> Row:
        return jsonl.parse_line(line.decode("utf-8", "replace"), self.path, f"byte {offset}")


def spread_order(count: int) -> list[int]:
    """Return 0 to ``count - 1`` in an order whose every beginning is spread evenly.

    >>> spread_order(8)
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    bits = max(count - 1, 0).bit_length()
    reversed_bits = (int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(1 << bits))
    return [i for i in reversed_bits if i < count]


def _end(file: BinaryIO) -> int:
    """Return the end of the last complete line."""
    position = file.seek(0, 2)
    while position:
        begin = max(0, position - _TAIL)
        file.seek(begin)
        newline = file.read(position - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        position = begin
    return 0


def _line_before(file: BinaryIO, offset: int) -> int:
    """Return the start of the line that ends before ``offset``."""
    position = offset - 1
    while position:
        begin = max(0, position - _TAIL)
        file.seek(begin)
        newline = file.read(position - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        position = begin
    return 0


def _line_after(file: BinaryIO, position: int, end: int) -> int:
    """Return the start of the first line at or after ``position``; ``end`` if there is none."""
    if position >= end:
        return end
    file.seek(position - 1)
    file.readline()
    return min(file.tell(), end)


def _lines_with(file: BinaryIO, needle: bytes, cursor: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Yield the lines that start in the portion at ``cursor`` and hold ``needle`` in any case, and their offsets."""
    file.seek(cursor)
    portion = file.read(min(_SEARCH_CHUNK, end - cursor))
    if not portion.endswith(b"\n"):
        portion += file.readline()
    lowered, position = portion.lower(), 0
    while position < len(lowered) and (found := lowered.find(needle, position)) >= 0:
        begin = portion.rfind(b"\n", 0, found) + 1
        stop = portion.index(b"\n", found)
        yield portion[begin:stop], cursor + begin
        position = stop + 1


def _holds(row: Row, text: str) -> bool:
    return any(text in str(row.get(name) or "").lower() for name in ("prompt", "response", "label"))
