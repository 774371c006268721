"""One row of a prompt source, and the errors about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from miles.base.input_error import InputError
from miles.base.one_line import one_line
from miles.tasks.data.settings import columns_to_choose, find_column

LONGEST_MESSAGE = 1000


@dataclass(frozen=True)
class Row:
    """Named columns and the row's place, ``where``: ``file.jsonl:17``, rows and lines counted from 1."""

    where: str
    columns: Mapping[str, Any]

    def find(self, name: str) -> Any:
        """Return the value of column ``name``, or of a part of one, as in ``answer.text``; None if it is absent."""
        return find_column(self.columns, name)

    def column(self, name: str, flag: str) -> Any:
        """Return what ``find`` does, chosen with ``flag``; raise ``InputError`` if it is absent or null."""
        if (value := self.find(name)) is not None:
            return value
        if name not in self.columns:
            self.refuse(f"no column {name!r}; {columns_to_choose(self.columns, name)}; choose one with {flag}")
        self.refuse(f"column {name!r} is null; fill it, remove the row, or choose another column with {flag}")

    def refuse(self, fault_and_what_to_do: str) -> NoReturn:
        """Raise the ``InputError`` of a malformed row, with its place."""
        raise InputError(one_line(f"{self.where}: {fault_and_what_to_do}", LONGEST_MESSAGE))
