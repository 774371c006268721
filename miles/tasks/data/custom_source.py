"""Prompts from the user's own source: ``--data-source-path``."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from miles.base.text import InputError
from miles.base.user_code import load_function, ordinary_errors
from miles.tasks.data.stream import TrainingStream
from miles.types.sample import Prompt, PromptGroup

FLAG = "--data-source-path"
ReadRow = Callable[[Mapping[str, Any], int], Prompt]  # of a row and its number


class DataSource(Protocol):
    """Gives rows, as a file of prompts has them. It is made once, as ``source(args)``."""

    def draw(self, n: int) -> Sequence[Mapping[str, Any]]:
        """Return the next ``n`` rows: objects with the columns of ``--input-key`` and the like."""

    def state(self) -> Mapping[str, Any]:
        """Return the position, in plain values that JSON can hold."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""


class CustomStream(TrainingStream):
    """Draws the user's rows. Rows that a resumed run draws again are kept in its state."""

    epoch = 0  # its passes are not known

    def __init__(self, path: str, args: SimpleNamespace, read: ReadRow) -> None:
        """Make the source at ``path``; ``read`` renders and tokenizes a row.

        Raises:
            InputError: The path cannot be imported.
        """
        self._path = path
        make = load_function(path, FLAG)
        with ordinary_errors(f"{FLAG} {path}:"):
            self._source: DataSource = make(args)
        self._read = read
        self._next_group_index = 0
        self._rows: dict[int, Mapping[str, Any]] = {}  # of the groups that may have to be drawn again
        self._again: list[int] = []  # groups to draw before new ones

    def draw(self, n: int) -> list[PromptGroup]:
        """Return the next ``n`` prompts as groups without samples.

        If a row cannot be read, no prompt is lost: the next draw, also in a resumed run, begins with these rows.
        """
        new = n - len(self._again)
        if new > 0:
            with ordinary_errors(f"{FLAG} {self._path}: draw({new})"):
                rows = self._source.draw(new)
            if not isinstance(rows, Sequence) or len(rows) != new or not all(isinstance(r, Mapping) for r in rows):
                raise InputError(f"{FLAG} {self._path}: draw({new}) returned {rows!r:.80}; return a list of {new} rows")
            indices = range(self._next_group_index, self._next_group_index + new)
            self._rows |= dict(zip(indices, rows, strict=True))
            self._again += indices
            self._next_group_index += new
        groups = [PromptGroup(index, self._read(self._rows[index], index)) for index in self._again[:n]]
        del self._again[:n]
        return groups

    def state(self, unfinished: Iterable[int] = ()) -> dict[str, Any]:
        """Return a position to resume from, at which the groups with the indices ``unfinished`` are drawn again.

        It is a copy, because the source keeps drawing while the position waits to be saved.

        Raises:
            InputError: JSON cannot hold the source's state, or a row.
        """
        waiting = sorted({*self._again, *unfinished})
        self._rows = {index: row for index, row in self._rows.items() if index in waiting}
        with ordinary_errors(f"{FLAG} {self._path}: state()"):
            source_state = self._source.state()
        state = self._copy("state()", source_state)
        rows = [[index, self._copy(f"row {index}", self._rows[index])] for index in waiting]
        return {"source": state, "next_group_index": self._next_group_index, "unfinished": rows}

    def _copy(self, what: str, value: Mapping[str, Any]) -> dict[str, Any]:
        try:
            copied: dict[str, Any] = json.loads(json.dumps(dict(value)))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{FLAG} {self._path}: {what} cannot be written as JSON, and is saved in checkpoints ({error}); give "
                "plain numbers, text, lists and objects by name"
            ) from error
        return copied

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``.

        Raises:
            InputError: It is the state of prompts from a file.
        """
        if "source" not in state:
            raise InputError(
                f"{FLAG} {self._path}: the checkpoint's position is one in --prompt-data, so it cannot continue from "
                "there; start a new run from its weights with --finetune"
            )
        with ordinary_errors(f"{FLAG} {self._path}: restore()"):
            self._source.restore(state["source"])
        self._next_group_index = state["next_group_index"]
        self._rows = {index: row for index, row in state["unfinished"]}
        self._again = sorted(self._rows)
