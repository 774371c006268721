"""Read rows from JSON lines, Parquet, Hugging Face datasets, reasoning_gym or verifiers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from miles.base import strict_json
from miles.base.text import InputError, one_line
from miles.tasks.data.reasoning_gym_task import read_reasoning_gym
from miles.tasks.data.row import LONGEST_MESSAGE, Row
from miles.tasks.data.settings import HUGGING_FACE, REASONING_GYM, SOURCES
from miles.tasks.data.verifiers_task import SCHEME as VERIFIERS
from miles.tasks.data.verifiers_task import read_verifiers

if TYPE_CHECKING:
    import pyarrow as pa


def read_rows(source: str) -> Iterator[Row]:
    """Yield the rows of ``source`` in order; raise ``InputError``, naming a bad row, if it cannot be read."""
    if source.startswith(REASONING_GYM):
        return read_reasoning_gym(source)
    if source.startswith(VERIFIERS):
        return read_verifiers(source)
    if source.startswith(HUGGING_FACE) or os.path.isdir(source):  # unlike Path, false for a long name
        return _read_hugging_face(source)
    path = Path(source)
    if path.suffix not in (".jsonl", ".parquet"):
        _refuse(source, f"not a prompt source; give {SOURCES}")
    if not os.path.isfile(path):
        _refuse(source, "no such file; check the path, which is relative to the folder the run starts in")
    return _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)


def _refuse(source: str, fault: str, cause: Exception | None = None) -> NoReturn:
    raise InputError(one_line(f"prompt source {one_line(source, 200)}: {fault}", LONGEST_MESSAGE)) from cause


def _read_jsonl(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with path.open("rb") as lines:  # bytes, so that a bad character is reported with its line
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_line(line, f"{path}:{number}")
    except OSError as error:
        raise InputError(f"{path}:{number + 1}: cannot be read ({error.strerror}); check the file") from error


def _parse_line(line: bytes, where: str) -> Row:
    try:
        value = strict_json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from error
    except strict_json.StrictJsonError as error:
        raise InputError(f"{where}: {error}; write one JSON object per line") from error
    if not isinstance(value, dict):
        raise InputError(f"{where}: a {type(value).__name__}, not an object; write one JSON object per line")
    return Row(where, value)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # pyarrow raises its own errors, OSError for a broken page, and ValueError for text that is not UTF-8.
    faults = (pa.ArrowException, OSError, ValueError, OverflowError)
    try:
        file = pq.ParquetFile(path)
    except faults as error:
        _refuse(str(path), f"not a Parquet file ({error}); write it again, or give another form", error)
    types = {field.name: field.type for field in file.schema_arrow}
    twice = [name for name, times in Counter(file.schema_arrow.names).items() if times > 1]
    if twice:
        _refuse(str(path), f"it has {twice[0]!r} as the name of two columns; rename one")
    number = 0
    with file:
        batches = file.iter_batches()
        while True:
            try:
                rows = next(batches).to_pylist()
            except StopIteration:
                return
            except faults as error:
                raise InputError(
                    f"{path}:{number + 1}: the rows from here on cannot be read ({one_line(str(error), 300)}); copy "
                    f"or write the file again"
                ) from error
            for columns in rows:
                number += 1
                where = f"{path}:{number}"
                try:
                    yield Row(where, {n: _as_written(v, types[n], strict_json.loads) for n, v in columns.items()})
                except strict_json.StrictJsonError as error:
                    raise InputError(f"{where}: {error}; write the file again") from error


def _read_hugging_face(source: str) -> Iterator[Row]:
    name, _, split = source.removeprefix(HUGGING_FACE).partition(":")
    loaded = _load_hugging_face(source, name, split or "train")
    rows, types = iter(loaded), {field.name: field.type for field in loaded.features.arrow_schema}
    number = 0
    while True:
        number += 1
        try:
            columns = next(rows)
        except StopIteration:
            return
        except Exception as error:  # the library's or pyarrow's, for a broken file
            fault = f"{type(error).__name__}: {one_line(str(error), 300)}"
            what_to_do = "save the set again"
            raise InputError(f"{source}:{number}: datasets cannot read the row ({fault}); {what_to_do}") from error
        yield Row(f"{source}:{number}", {n: _as_written(v, types[n], None) for n, v in columns.items()})


def _as_written(value: Any, kind: pa.DataType, read_json: Callable[[str], Any] | None) -> Any:
    """Return a value of Arrow's type ``kind`` without the null keys of its objects.

    Arrow gives every object of a column the keys of all of them. What it stores as JSON has only its own, and is read
    with ``read_json``, unless this is done.
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


def _load_hugging_face(source: str, name: str, split: str) -> Any:
    import datasets

    try:
        if not _is_saved(name):
            return datasets.load_dataset(name, split=split)
        loaded = datasets.load_from_disk(name)
    except Exception as error:  # the library's, the hub client's, pyarrow's: each has its own family
        _refuse(
            source,
            f"datasets cannot load it ({type(error).__name__}: {error}); check the name and the split, and that the "
            f"machine reaches the hub or holds the set in its cache",
            error,
        )
    if isinstance(loaded, datasets.Dataset):
        return loaded  # one split was saved, without a name
    if split not in loaded:
        _refuse(source, f"no split {split}; it has {', '.join(loaded)}: write hf:{name}:SPLIT")
    return loaded[split]


def _is_saved(folder: str) -> bool:
    """``folder`` was written by ``save_to_disk``, of a set or of a dictionary of splits."""
    return any(os.path.isfile(os.path.join(folder, marker)) for marker in ("dataset_dict.json", "state.json"))
