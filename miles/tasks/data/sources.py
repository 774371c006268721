"""Rows of JSON lines, Parquet, Hugging Face datasets, reasoning_gym or verifiers, read when they are asked for.

A source of another kind plugs in as a subclass of ``Rows`` (row.py): its number of rows, a range of them, and a hash of
what they hold. Nothing else knows where rows are stored, and none is kept in memory: a file of JSON lines is indexed by
offset, Parquet is copied into an Arrow file without a name, ``datasets`` maps its files, and a task of reasoning_gym
is made again.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import tempfile
import threading
import zlib
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from miles.base import strict_json
from miles.base.text import InputError, one_line
from miles.tasks.data.reasoning_gym_task import GymTask
from miles.tasks.data.row import LONGEST_MESSAGE, Row, Rows
from miles.tasks.data.settings import HUGGING_FACE, REASONING_GYM, SOURCES
from miles.tasks.environments.verifiers_tasks import METADATA as ORIGIN
from miles.tasks.environments.verifiers_tasks import SCHEME as VERIFIERS
from miles.tasks.environments.verifiers_tasks import read_tasks

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH = 1024  # rows of Parquet that are read together


class SourceAbsent(InputError):
    """The source is not on this machine."""


def is_of_datasets(source: str) -> bool:
    """Return whether the library ``datasets`` reads ``source``: from the hub, or a folder."""
    return source.startswith(HUGGING_FACE) or os.path.isdir(source)  # unlike Path, false for a long name


def open_rows(source: str) -> Rows:
    """Return the rows of ``source``; raise ``InputError`` if it cannot be read at all."""
    if source.startswith(REASONING_GYM):
        return GymTask(source)
    if source.startswith(VERIFIERS):
        return _Verifiers(source)
    if is_of_datasets(source):
        return _HuggingFace(source)
    path = Path(source)
    if path.suffix not in (".jsonl", ".parquet"):
        _refuse(source, f"not a prompt source; give {SOURCES}")
    if not os.path.isfile(path):
        fault = "no such file; check the path, which is relative to the folder the run starts in"
        _refuse(source, fault, kind=SourceAbsent)
    return _JsonLines(path) if path.suffix == ".jsonl" else _Parquet(path)


def _refuse(source: str, fault: str, cause: Exception | None = None, kind: type[InputError] = InputError) -> NoReturn:
    raise kind(one_line(f"prompt source {one_line(source, 200)}: {fault}", LONGEST_MESSAGE)) from cause


class _JsonLines(Rows):
    """Lines of JSON, found by offset. The file stays open, so that one that replaces it does not change the rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("Q")
        self._lengths = array("I")
        self._lines = array("I")
        self._sums = array("L")
        digest = hashlib.blake2b(digest_size=16)
        start = number = 0
        try:
            self._file = path.open("rb")
            for number, line in enumerate(self._file, start=1):
                digest.update(line)
                if not line.isspace():
                    self._starts.append(start)
                    self._lengths.append(len(line))
                    self._lines.append(number)
                    self._sums.append(zlib.crc32(line))
                start += len(line)
        except OSError as error:
            raise InputError(f"{path}:{number + 1}: cannot be read ({error.strerror}); check the file") from error
        self.content = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, start: int, stop: int) -> Iterator[Row | InputError]:
        if start >= stop:
            return
        first, end = self._starts[start], self._starts[stop - 1] + self._lengths[stop - 1]
        block = os.pread(self._file.fileno(), end - first, first)
        for number in range(start, stop):
            where = f"{self._path}:{self._lines[number]}"
            at = self._starts[number] - first
            line = block[at : at + self._lengths[number]]
            if zlib.crc32(line) != self._sums[number]:
                yield InputError(
                    f"{where}: the line was changed after the run had read it; resume from the last checkpoint, and "
                    "leave a file alone that a run reads, or put the new one into its place with mv"
                )
                continue
            try:
                yield _parse_line(line, where)
            except InputError as error:
                yield error


def _parse_line(line: bytes, where: str) -> Row:
    try:
        value = strict_json.loads(line.removeprefix(codecs.BOM_UTF8).decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from error
    except strict_json.StrictJsonError as error:
        raise InputError(f"{where}: {error}; write one JSON object per line") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: a {type(value).__name__}, not an object; write one JSON object per line")
    return Row(where, value)


class _Parquet(Rows):
    """Parquet, which can only be read from the start, copied into an Arrow file that is gone with the process."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        # pyarrow raises its own errors, OSError for a broken page, and ValueError for text that is not UTF-8.
        faults = (pa.ArrowException, OSError, ValueError, OverflowError)
        self._path = path
        self._broken = ""  # why no further rows can be read
        self._ends: list[int] = []  # of each batch, in rows
        try:
            parquet = pq.ParquetFile(path, pre_buffer=False)
        except faults as error:
            _refuse(str(path), f"not a Parquet file ({error}); write it again, or give another form", error)
        self._types = {field.name: field.type for field in parquet.schema_arrow}
        twice = [name for name, times in Counter(parquet.schema_arrow.names).items() if times > 1]
        if twice:
            _refuse(str(path), f"it has {twice[0]!r} as the name of two columns; rename one")
        with tempfile.NamedTemporaryFile() as file, parquet:  # only its name is gone then
            with pa.ipc.new_file(file.name, parquet.schema_arrow) as copy:
                batches = parquet.iter_batches(_BATCH)
                while True:
                    try:
                        batch = next(batches)
                        batch.validate(full=True)  # offsets, and that text is UTF-8
                    except StopIteration:
                        break
                    except faults as error:
                        self._broken = one_line(str(error), 300)
                        break
                    copy.write_batch(batch)
                    self._ends.append((self._ends[-1] if self._ends else 0) + len(batch))
            self._batches = pa.ipc.open_file(pa.OSFile(file.name))
        self._reading = threading.Lock()  # the reader has one position in its file
        with path.open("rb") as whole:
            self.content = hashlib.file_digest(whole, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

    def __len__(self) -> int:
        return (self._ends[-1] if self._ends else 0) + bool(self._broken)

    def read(self, start: int, stop: int) -> Iterator[Row | InputError]:
        for number in range(bisect_right(self._ends, start), len(self._ends)):
            begin = self._ends[number - 1] if number else 0
            if begin >= stop:
                break
            first, end = max(start, begin), min(stop, self._ends[number])
            with self._reading:
                rows = self._batches.get_batch(number).slice(first - begin, end - first)
            for place, columns in enumerate(rows.to_pylist(), first + 1):
                yield self._row(columns, f"{self._path}:{place}")
        if self._broken and stop == len(self):
            yield InputError(
                f"{self._path}:{stop}: the rows from here on cannot be read ({self._broken}); copy or write the file "
                "again"
            )

    def _row(self, columns: dict[str, Any], where: str) -> Row | InputError:
        try:
            return Row(where, {n: _as_written(v, self._types[n], strict_json.loads) for n, v in columns.items()})
        except strict_json.StrictJsonError as error:
            return InputError(f"{where}: {error}; write the file again")


class _HuggingFace(Rows):
    """A set of ``datasets``, which maps its files into memory."""

    def __init__(self, source: str) -> None:
        name, _, split = source.removeprefix(HUGGING_FACE).partition(":")
        self._source = source
        self._set = load_hugging_face(source, name, split or "train")
        _leave_encoded(self._set.info.features)
        self._types = {field.name: field.type for field in self._set.features.arrow_schema}
        files = [os.stat(file["filename"]) for file in self._set.cache_files]
        stamps = [[file.st_size, file.st_mtime_ns] for file in files]
        self.content = json.dumps([self._set._fingerprint, stamps]) if files else ""

    def __len__(self) -> int:
        return len(self._set)

    def read(self, start: int, stop: int) -> Iterator[Row | InputError]:
        try:
            columns = self._set[start:stop]
            rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        except Exception as error:  # the library's or pyarrow's, for a broken file
            if stop - start > 1:
                for number in range(start, stop):
                    yield from self.read(number, number + 1)
                return
            fault = f"{type(error).__name__}: {one_line(str(error), 300)}"
            yield InputError(f"{self._source}:{stop}: datasets cannot read the row ({fault}); save the set again")
            return
        for number, row in enumerate(rows, start=start + 1):
            yield Row(f"{self._source}:{number}", {n: _as_written(v, self._types[n], None) for n, v in row.items()})


def _leave_encoded(feature: Any) -> None:
    """Have ``datasets`` give the files of images, and not their pixels, in every column that has them."""
    import datasets

    if isinstance(feature, datasets.Image):
        feature.decode = False
    parts = feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]
    for part in parts:
        if part is not None:
            _leave_encoded(part)


class _Verifiers(Rows):
    """The tasks of a set, which its library has made at once: prompts and metadata, without labels.

    ``--environment verifiers`` needs the metadata to find the task again.
    """

    columns = ("prompt", "label", "metadata")

    def __init__(self, source: str) -> None:
        """Make the tasks of ``verifiers:TASKSET[:key=value,...]``. Raises ``InputError`` as ``read_tasks`` does."""
        self._rows = [
            Row(f"{source}:{origin['index'] + 1}", {"prompt": prompt, "label": None, "metadata": {ORIGIN: origin}})
            for prompt, origin in read_tasks(source)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, stop: int) -> Iterator[Row | InputError]:
        yield from self._rows[start:stop]


def _as_written(value: Any, kind: pa.DataType, read_json: Callable[[str], Any] | None) -> Any:
    """Return a value of Arrow's type ``kind`` without the null keys of its objects.

    Arrow gives every object of a column the keys of all of them. A value stored as JSON has only its own keys; it is
    read with ``read_json``, unless this is done already.
    """
    import pyarrow as pa

    if isinstance(kind, pa.JsonType):
        return value if value is None or read_json is None else read_json(value)
    if pa.types.is_struct(kind) and isinstance(value, dict):
        parts = {field.name: field.type for field in kind}
        return {key: _as_written(part, parts[key], read_json) for key, part in value.items() if part is not None}
    if isinstance(value, float) and (pa.types.is_float32(kind) or pa.types.is_float16(kind)):
        return float(str(kind.to_pandas_dtype()(value)))  # the shortest decimal at this width
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_as_written(part, kind.value_type, read_json) for part in value]
    return value


def load_hugging_face(source: str, name: str, split: str, config: str | None = None) -> Any:
    """Load a split of a set on the hub, in a folder of its files, or in one that ``save_to_disk`` wrote.

    Raises:
        InputError: It cannot be loaded; the message begins with ``source``.
    """
    import datasets

    try:
        if not _is_saved(name):
            return datasets.load_dataset(name, config, split=split)
        loaded = datasets.load_from_disk(name)
    except Exception as error:  # the library's, the hub client's, pyarrow's: each has its own family
        fault = f"datasets cannot load it ({type(error).__name__}: {error})"
        if os.path.isdir(name):
            _refuse(source, f"a folder, and {fault}; give the file in it that has the rows", error)
        what_to_do = "check the name and the split, and that the machine reaches the hub or holds the set in its cache"
        _refuse(source, f"{fault}; {what_to_do}", error, SourceAbsent)
    if isinstance(loaded, datasets.Dataset):
        return loaded  # one split was saved, without a name
    if split not in loaded:
        _refuse(source, f"no split {split}; it has {', '.join(loaded)}: write hf:{name}:SPLIT")
    return loaded[split]


def _is_saved(folder: str) -> bool:
    """Return whether ``save_to_disk`` of a set, or of a dictionary of splits, wrote ``folder``."""
    return any(os.path.isfile(os.path.join(folder, marker)) for marker in ("dataset_dict.json", "state.json"))
