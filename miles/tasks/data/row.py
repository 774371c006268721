"""The rows of a prompt source, and the errors about one."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from miles.base.text import InputError, one_line
from miles.tasks.data.settings import columns_to_choose, find_column

LONGEST_MESSAGE = 1000


@dataclass(frozen=True)
class Row:
    """Named columns and the row's position, ``where``: ``file.jsonl:17``, rows and lines counted from 1.

    ``files`` has the state of each file that was read for the row, such as an image.
    """

    where: str
    columns: Mapping[str, Any]
    files: dict[str, list[int]] = field(default_factory=dict, compare=False, repr=False)

    def find(self, name: str) -> Any:
        """Return the value of column ``name``, or of a part of one, as in ``answer.text``; None if it is absent."""
        return find_column(self.columns, name)

    def column(self, name: str, flag: str) -> Any:
        """Return the result of ``find``, chosen with ``flag``; raise ``InputError`` if it is absent or null."""
        if (value := self.find(name)) is not None:
            return value
        if name not in self.columns:
            self.refuse(f"no column {name!r}; {columns_to_choose(self.columns, name)}; choose one with {flag}")
        self.refuse(f"column {name!r} is null; fill it, remove the row, or choose another column with {flag}")

    def refuse(self, fault_and_what_to_do: str) -> NoReturn:
        """Raise the ``InputError`` of a malformed row, with its position."""
        raise InputError(one_line(f"{self.where}: {fault_and_what_to_do}", LONGEST_MESSAGE))


class Rows(ABC):
    """The rows of a source in order, read when they are asked for. Threads may share them.

    Attributes:
        content: A hash of the rows' content; empty if it is not known, so that no verdict about them is remembered.
        columns: The columns of prompt, label and metadata, whatever flags name, of rows whose labels may be null; None
            if flags name them.
    """

    content: str = ""
    columns: tuple[str, str, str] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[Row | InputError]:
        """Yield the rows from ``start`` to ``stop``, each of them or why it cannot be read."""

    def __getitem__(self, number: int) -> Row:
        """Return row ``number``, counted from 0; raise ``InputError`` if it cannot be read."""
        (row,) = self.read(number, number + 1)
        if isinstance(row, InputError):
            raise row
        return row


def state_of(file: str) -> list[int]:
    """Return size and time of the last change of a file; an empty list if it cannot be read."""
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return []
    return [status.st_size, status.st_mtime_ns]


# Count the unusual rows of a source: one line for each kind, with the position of the first.


_logger = logging.getLogger(__name__)


class Notes:
    """Counts unusual rows that are allowed, by kind.

    Attributes:
        counts: The number of rows of each kind, and the position of the first.
    """

    def __init__(self, counts: Mapping[str, Sequence[Any]] | None = None) -> None:
        self.counts: dict[str, tuple[int, str]] = {kind: (n, first) for kind, (n, first) in (counts or {}).items()}

    def add(self, kind: str, where: str) -> None:
        """Count the row at ``where`` under ``kind``, which describes how the row is unusual."""
        self.add_all(kind, 1, where)

    def add_all(self, kind: str, rows: int, where: str) -> None:
        """Count many rows, which begin at ``where``."""
        times, first = self.counts.get(kind, (0, where))
        self.counts[kind] = times + rows, first

    def log_new(self, other: Notes) -> None:
        """Log the kinds of ``other`` that are not here yet, and count them: for rows without end, a line per kind."""
        for kind, (rows, where) in other.counts.items():
            if kind not in self.counts:
                _logger.warning("%s: %s; later rows like it are not reported", where, kind)
            self.add_all(kind, rows, where)

    def lines(self, total: int) -> list[str]:
        """Return a line for each kind."""
        return [
            f"{times} of {total} prompts: {kind}; the first is {first}" for kind, (times, first) in self.counts.items()
        ]

    def log(self, source: str, total: int) -> None:
        """Log a line for each kind."""
        for line in self.lines(total):
            _logger.warning("%s: %s", source, line)
