"""The metrics of a run: metrics.jsonl read as columns, as far as it has grown."""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles.observe import run_files

READ_AT_ONCE = 1 << 24
_NUMBERS = {int, float}


class MetricsFile:
    """The metrics of a run, one column per name with one entry per step; NaN if a step lacks the metric.

    ``refresh`` reads only what was added. A file that was cut or replaced (a run that resumed) is read again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self._identity: int | None = None
        self._consumed = 0
        self._line = 0

    @property
    def steps(self) -> Sequence[int]:
        """The steps that have a row, in order."""
        return self._steps

    @property
    def names(self) -> list[str]:
        """The names of all metrics, sorted."""
        return sorted(self._columns)

    @property
    def revision(self) -> str:
        """A text that changes whenever the columns do."""
        return f"{self._identity}-{self._consumed}"

    def column(self, name: str) -> Sequence[float]:
        """Return one value per step; all NaN if no step has the metric."""
        return self._columns.get(name) or array("d", [math.nan]) * len(self._steps)

    def is_zero(self, name: str, least: float) -> bool:
        """Return whether every measurement is ``least`` or nearer to zero."""
        return all(not abs(value) > least for value in self.column(name))

    def refresh(self) -> bool:
        """Read the complete lines that were added; return whether anything changed.

        Raises:
            ValueError: A line is not a JSON object with a step; the message names file and line.
        """
        if not self._path.is_file():
            changed = bool(self._steps)
            self._forget()
            return changed
        with self._path.open("rb") as file:
            status = self._path.stat()
            if status.st_ino != self._identity or status.st_size < self._consumed:
                self._forget()
                self._identity = status.st_ino
            before = self._consumed
            file.seek(self._consumed)
            while chunk := file.read(READ_AT_ONCE):
                complete = chunk.rfind(b"\n") + 1
                if not complete:  # a line that is still being written
                    break
                lines = chunk[: complete - 1].split(b"\n")
                for number, line in enumerate(lines, self._line + 1):
                    try:
                        self._add(line, number)
                    except OverflowError as error:
                        raise ValueError(f"{self._path}:{number}: {error}; remove the line or the file") from error
                self._line += len(lines)  # not before: after a line that cannot be read, all of these are read again
                self._consumed += complete
                file.seek(self._consumed)
        return self._consumed != before

    def _add(self, line: bytes, number: int) -> None:
        row = run_files.parse_line(line.decode("utf-8", "replace"), self._path, number)
        step = row.pop("step", None)
        if not isinstance(step, int):
            raise ValueError(f"{self._path}:{number}: the row has no step; remove the line or the file")
        index = bisect_left(self._steps, step)
        if index == len(self._steps):
            self._steps.append(step)
            if row.keys() == self._columns.keys() and _NUMBERS.issuperset(map(type, row.values())):
                for name, value in row.items():  # most rows: every metric again
                    self._columns[name].append(value)
                return
            for column in self._columns.values():
                column.append(math.nan)
        elif self._steps[index] != step:
            self._steps.insert(index, step)
            for column in self._columns.values():
                column.insert(index, math.nan)
        for name, value in row.items():
            if value.__class__ is float or value.__class__ is int:  # not null, and no text
                if name not in self._columns:
                    self._columns[name] = array("d", [math.nan]) * len(self._steps)
                self._columns[name][index] = value

    def rows_between(self, first: float | None, last: float | None) -> range:
        """Return the positions of the steps from ``first`` to ``last``, both included; None: no bound."""
        begin = 0 if first is None else bisect_left(self._steps, math.ceil(first))
        end = len(self._steps) if last is None else bisect_left(self._steps, math.floor(last) + 1)
        return range(begin, max(begin, end))

    def points(self, names: Sequence[str], first: float | None, last: float | None, limit: int) -> dict[str, Any]:
        """Return ``{"steps": [...], "values": {name: [...]}}`` of a range of steps; None where nothing was measured.

        If the range has more than ``limit`` steps, it is cut into ``limit / 2`` parts, and each part gives the
        smallest and the largest value of each metric, in the order of their steps: no spike is lost. The steps are then
        only near the steps of the values (``"exact"`` is False), and ``"last"`` has the last value of each metric.
        """
        rows = self.rows_between(first, last)
        if len(rows) <= limit:
            part = slice(rows.start, rows.stop)
            values = {name: [six_digits(value) for value in self.column(name)[part]] for name in names}
            return {"steps": list(self._steps[part]), "values": values, "exact": True}
        count = max(limit // 2, 1)
        bounds = [rows.start + len(rows) * part // count for part in range(count + 1)]
        steps = [self._steps[i] for a, b in zip(bounds, bounds[1:], strict=False) for i in (a, (a + b) // 2)]
        values = {name: _extremes(self.column(name), bounds) for name in names}
        newest = {name: six_digits(newest_value(self.column(name)[rows.start : rows.stop])) for name in names}
        return {"steps": steps, "values": values, "exact": False, "last": newest}


def _extremes(column: Sequence[float], bounds: Sequence[int]) -> list[float | None]:
    """Return two values of each part: its smallest and its largest, in order; None, None if nothing was measured."""
    extremes: list[float | None] = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        part = [v for v in column[begin:end] if v == v]
        if not part:
            extremes += [None, None]
            continue
        low, high = min(part), max(part)
        pair = (low, high) if part.index(low) <= part.index(high) else (high, low)
        extremes += map(six_digits, pair)
    return extremes


def newest_value(column: Sequence[float]) -> float:
    """Return the last value that was measured; NaN if there is none."""
    return next((value for value in reversed(column) if value == value), math.nan)


def six_digits(value: float) -> float | None:
    """Return the value with six significant digits, None for a value that JSON cannot hold."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def to_json(value: Any) -> bytes:
    """Return strict JSON in UTF-8; a lone surrogate, which UTF-8 cannot hold, becomes its escape."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")
