"""Where rows come from: JSON lines, Parquet, Hugging Face datasets, reasoning_gym."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from miles.data.reasoning_gym_task import SCHEME as REASONING_GYM
from miles.data.reasoning_gym_task import read_reasoning_gym
from miles.data.row import Row

FORMS = "FILE.jsonl, FILE.parquet, hf:NAME[:SPLIT], a folder saved by datasets, or reasoning_gym:TASK[:key=value,...]"
_HUGGING_FACE = "hf:"


def read_rows(source: str) -> Iterator[Row]:
    """Yield the rows of ``source`` in order; raise ``ValueError``, naming a bad row, if it cannot be read."""
    if source.startswith(REASONING_GYM):
        return read_reasoning_gym(source)
    if source.startswith(_HUGGING_FACE) or Path(source).is_dir():
        return _read_hugging_face(source)
    path = Path(source)
    if path.suffix not in (".jsonl", ".parquet"):
        _refuse(source, f"not a prompt source; give {FORMS}")
    if not path.is_file():
        _refuse(source, "no such file; check the path, which is relative to the folder the run starts in")
    return _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)


def _refuse(source: str, fault: str, cause: Exception | None = None) -> NoReturn:
    raise ValueError(f"prompt source {source}: {fault}") from cause


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:  # bytes, so that a bad character is reported with its line
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse_line(line, f"{path}:{number}")


def _parse_line(line: bytes, where: str) -> Row:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not JSON ({error.msg}, column {error.colno}); write one JSON object per line"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a {type(value).__name__}, not an object; write one JSON object per line")
    return Row(where, value)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowException as error:
        _refuse(str(path), f"not a Parquet file ({error}); write it again, or give another form", error)
    number = 0
    with file:
        for batch in file.iter_batches():
            for columns in batch.to_pylist():
                number += 1
                yield Row(f"{path}:{number}", columns)


def _read_hugging_face(source: str) -> Iterator[Row]:
    name, _, split = source.removeprefix(_HUGGING_FACE).partition(":")
    for number, columns in enumerate(_load_hugging_face(source, name, split or "train"), start=1):
        yield Row(f"{source}:{number}", columns)


def _load_hugging_face(source: str, name: str, split: str) -> Any:
    import datasets

    try:
        if not _is_saved(Path(name)):
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


def _is_saved(folder: Path) -> bool:
    """``folder`` was written by ``save_to_disk``, of a set or of a dictionary of splits."""
    return any((folder / marker).is_file() for marker in ("dataset_dict.json", "state.json"))
