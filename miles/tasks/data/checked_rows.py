"""One check of all rows of a source, whose verdict is remembered, and the prompts that are then made when drawn.

``check_rows`` reads, renders and measures every row once, in a stream. It returns a ``RowsVerdict``: which rows are
short enough, which are unusual, or all faults. The verdict of the same content under the same flags, tokenizer and code
is read from the user's cache (``verdict_key``), also by other processes of the run. A ``PromptSet`` then makes a prompt
of its row whenever it is drawn.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import version
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

import miles
from miles.base.cache import store, stored
from miles.base.flags import FlagError
from miles.base.processes import pool_of
from miles.base.text import InputError
from miles.tasks.data.row import Notes, Row, Rows, state_of
from miles.types.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

P = TypeVar("P", bound=Prompt)
P_co = TypeVar("P_co", bound=Prompt, covariant=True)
T = TypeVar("T")
MOST_FAULTS = 5  # of a source that are reported; the check ends there
MOST_PROCESSES = 16
_BATCH = 256  # rows that are tokenized together
_RANGE = 4096  # rows that a process checks at once
_MANY = 20_000  # rows that several processes check
_PROGRESS_SECONDS = 1.0  # between two lines of progress
_OF_TOKENIZERS = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")


@dataclass
class RowsVerdict:
    """The result of the check of all rows of a source, or of a range of them.

    Attributes:
        rows: How many rows there are.
        usable: The numbers of those that are short enough, in order.
        first_long: The position of the first that is not; empty if all are.
        shortest: The least tokens of a prompt that was tokenized: the first rows, and those that may be too long.
        longest: The most tokens of one.
        notes: The unusual rows that are allowed.
        faults: The faults, a message for each row.
        files: The state of each file that rows name, such as an image. The verdict is about these states.
    """

    rows: int = 0
    usable: array[int] = field(default_factory=lambda: array("I"))
    first_long: str = ""
    shortest: int = sys.maxsize
    longest: int = 0
    notes: Notes = field(default_factory=Notes)
    faults: list[str] = field(default_factory=list)
    files: dict[str, list[int]] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        """How many rows are too long."""
        return self.rows - len(self.usable)

    def add(self, later: RowsVerdict) -> None:
        """Add the verdict about the rows that follow."""
        self.rows += later.rows
        self.usable += later.usable
        self.first_long = self.first_long or later.first_long
        self.shortest, self.longest = min(self.shortest, later.shortest), max(self.longest, later.longest)
        for kind, (times, first) in later.notes.counts.items():
            self.notes.add_all(kind, times, first)
        self.faults += later.faults
        self.files |= later.files


class Make(Protocol[P_co]):
    """Makes prompts of rows, with notes of unusual ones; instead of a prompt, the row's fault."""

    def __call__(self, rows: Sequence[Row], notes: Notes, is_exact: bool) -> Sequence[P_co | InputError]:
        """Return one for each row; without tokens if they are certainly few enough, unless it ``is_exact``."""


def check_rows(source: str, rows: Rows, make: Make[P], is_long: Callable[[P], bool], key: str) -> RowsVerdict:
    """Check every row of ``source``, or recall the verdict of an earlier check.

    Args:
        source: The source, for messages.
        rows: Its rows.
        make: Makes the prompts.
        is_long: Whether a prompt is left out for its length.
        key: A hash of all that the verdict depends on (``verdict_key``); empty if that is not known.

    Raises:
        FlagError: The faults of rows, a message for each, ``MOST_FAULTS`` at most; or there are no rows.
    """
    if (known := _remembered(key)) is not None:
        return known
    if not len(rows):
        raise FlagError(f"prompt source {source}: it is empty; give one with at least one row")
    check = _Check(rows, make, is_long)
    verdict = check(0)
    progress = _Progress(source, len(rows))
    try:
        with _workers(check, len(rows)) as parts:
            for part in parts:
                verdict.add(part)
                progress.show(verdict.rows)
                if len(verdict.faults) >= MOST_FAULTS:
                    break
    except BrokenProcessPool:
        fault = (
            "a process that checked its rows was killed, most likely for lack of memory; free memory, and start again"
        )
        raise InputError(f"prompt source {source}: {fault}") from None
    progress.end()
    if verdict.faults:
        raise FlagError(*_each_once(verdict.faults[:MOST_FAULTS]))
    _remember(key, verdict)
    return verdict


def _each_once(faults: Iterable[str]) -> Iterator[str]:
    """Yield each fault once, with the other rows that have it: a misspelt column is missing in all."""
    rows: dict[str, list[str]] = {}
    for fault in faults:
        row, _, words = fault.partition(": ")
        rows.setdefault(words, []).append(row)
    for words, (first, *others) in rows.items():
        yield f"{first}: {words}" + (f" (also {', '.join(others)})" if others else "")


@dataclass(frozen=True)
class _Check(Generic[P]):
    """Checks the rows of a source from ``start`` on: the first few exactly, then a range of them."""

    rows: Rows
    make: Make[P]
    is_long: Callable[[P], bool]
    ended: mmap = field(default_factory=partial(mmap, -1, 1))  # shared with forks: not 0 if nobody waits for a verdict

    def __call__(self, start: int) -> RowsVerdict:
        stop = min(start + (_RANGE if start else _BATCH), len(self.rows))
        verdict = RowsVerdict(stop - start)
        for first in range(start, stop, _BATCH):
            if self.ended[0]:
                break
            read = list(self.rows.read(first, min(first + _BATCH, stop)))
            prompts = iter(self.make([row for row in read if isinstance(row, Row)], verdict.notes, is_exact=not start))
            for number, row in enumerate(read, start=first):
                prompt = row if isinstance(row, InputError) else next(prompts)
                if isinstance(row, Row):
                    verdict.files |= row.files
                if isinstance(prompt, InputError):
                    verdict.faults.append(str(prompt))
                    continue
                if tokens := len(prompt.token_ids):
                    verdict.shortest = min(verdict.shortest, tokens)
                    verdict.longest = max(verdict.longest, tokens)
                if not self.is_long(prompt):
                    verdict.usable.append(number)
                elif not verdict.first_long:
                    verdict.first_long = prompt.source
        return verdict


@contextmanager
def _workers(check: _Check[Any], rows: int) -> Iterator[Iterable[RowsVerdict]]:
    """Yield the verdicts about all ranges but the first rows, in order; of many rows, made in several processes."""
    starts = range(_BATCH, rows, _RANGE)
    if rows < _MANY or not may_fork():
        yield map(check, starts)
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive the fork
    pool = pool_of(min(MOST_PROCESSES, len(os.sched_getaffinity(0))), "fork", partial(_be_worker, check))
    try:
        yield pool.map(_checked, starts)
    finally:
        check.ended[0] = 1
        pool.shutdown(cancel_futures=True)


def may_fork() -> bool:
    """Return whether this process can be forked: nothing in it has started threads, as torch and Ray do."""
    return sys.platform == "linux" and sys.modules.get("torch") is None and threading.active_count() == 1


def _be_worker(check: Callable[[int], RowsVerdict]) -> None:
    global _check
    _check = check


def _checked(start: int) -> RowsVerdict:
    return _check(start)


_check: Callable[[int], RowsVerdict]  # of a worker: objects that cannot be pickled come from the fork


def caught(make: Callable[[], T]) -> T | InputError:
    """Return the result of ``make``, or the error about a row that it raises; one about a flag is about all rows."""
    try:
        return make()
    except FlagError:
        raise
    except InputError as error:
        return error


class _Progress:
    """Shows on stderr how far a check is that takes longer than a second; in a file, a line every ten seconds."""

    def __init__(self, source: str, rows: int) -> None:
        self._source, self._rows = source, rows
        self._last = time.monotonic()
        self._has_printed = False
        self._live = sys.stderr.isatty()

    def show(self, done: int) -> None:
        """Show that ``done`` rows are checked, unless that was shown just now."""
        if time.monotonic() - self._last > (_PROGRESS_SECONDS if self._live else 10 * _PROGRESS_SECONDS):
            self._last = time.monotonic()
            self._has_printed = True
            text = f"checking {self._source}: {done:,} of {self._rows:,} rows"
            print(f"\r{text}" if self._live else f"{text}\n", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the line, if there is one."""
        if self._has_printed and self._live:
            print(file=sys.stderr)


def verdict_key(source: str, rows: Rows, tokenizer: str, *decisive: Any) -> str:
    """Return a hash of all that a verdict depends on; empty if the content of rows or tokenizer is not known.

    Args:
        source: The source, whose name is in the notes.
        rows: Its rows.
        tokenizer: The folder of the tokenizer, or its name on the hub.
        decisive: Further values that decide which rows are right, as ``repr`` shows them.
    """
    files = tokenizer_files(tokenizer)
    if not rows.content or not files:
        return ""
    digest = hashlib.blake2b(repr((source, rows.content, decisive, _code())).encode(), digest_size=16)
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def name_of(tokenizer: PreTrainedTokenizerBase | str | None) -> str:
    """Return the folder of a tokenizer, or its name on the hub; empty text for one that was made in this process."""
    return tokenizer if isinstance(tokenizer, str) else getattr(tokenizer, "name_or_path", "")


def tokenizer_files(name: str) -> list[Path]:
    """Return the files that decide how a tokenizer reads; none for one that is not on this machine."""
    if not os.path.isdir(name):
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            path = try_to_load_from_cache(name, "tokenizer_config.json")
        except HFValidationError:  # of a tokenizer that was made in this process
            return []
        if not isinstance(path, str):
            return []
        name = os.path.dirname(path)
    return [file for file in sorted(Path(name).iterdir()) if file.suffix in _OF_TOKENIZERS and file.is_file()]


@cache
def _code() -> str:
    """Return a hash of the code that judges rows, and of its libraries."""
    digest = hashlib.blake2b(digest_size=16)
    for room in ("models", "tasks"):
        for file in sorted(Path(miles.__file__).parent.joinpath(room).rglob("*.py")):
            digest.update(file.read_bytes())
    return " ".join([digest.hexdigest(), *map(version, ("transformers", "tokenizers", "jinja2"))])


def _remembered(key: str) -> RowsVerdict | None:
    if not key:
        return None
    with suppress(OSError, ValueError):  # there is none, or a file of the rows is gone
        head, _, numbers = (stored(f"rows/{key}") or b"").partition(b"\n")
        values = json.loads(head)
        if all(state_of(file) == state for file, state in values["files"].items()):
            return RowsVerdict(**values | {"notes": Notes(values["notes"]), "usable": array("I", numbers)})
    return None


def _remember(key: str, verdict: RowsVerdict) -> None:
    if key:
        values = {name: value for name, value in vars(verdict).items() if name != "usable"}
        head = json.dumps(values | {"notes": verdict.notes.counts}).encode()
        store(f"rows/{key}", head + b"\n" + verdict.usable.tobytes())


class PromptSet(Sequence[P]):
    """The prompts of one source, in its order, each made of its row when it is asked for.

    Attributes:
        verdict: The result of the check of the rows.
        dropped: How many rows were left out for their length.
        limit: The limit that decided that, in words.
    """

    def __init__(
        self,
        rows: Rows,
        verdict: RowsVerdict,
        make: Callable[[Row], P],
        unrendered: Callable[[Row], Prompt],
        limit: str,
    ) -> None:
        """Take the rows that fit.

        Args:
            rows: The rows.
            verdict: Which of them are usable.
            make: Makes the prompt of a row.
            unrendered: Returns the content of a row, whatever template and tokenizer read it.
            limit: The limit that decides which rows are usable, in words.
        """
        self._rows, self._numbers = rows, verdict.usable
        self._make, self._unrendered = make, unrendered
        self.verdict, self.limit = verdict, limit

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> P: ...

    @overload
    def __getitem__(self, index: slice) -> list[P]: ...

    def __getitem__(self, index: int | slice) -> P | list[P]:
        """Make the prompt at ``index``; a list of them for a slice."""
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        return self._make(self._rows[self._numbers[index]])

    def unrendered(self, step: int) -> Iterator[Prompt]:
        """Yield the content of every ``step``-th row, as prompts without tokens."""
        return (self._unrendered(self._rows[number]) for number in self._numbers[::step])
