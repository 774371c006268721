"""One JSON object per line: the form in which a run keeps its numbers and sampled answers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from miles.base.host.disk_faults import naming_disk

_ERRORS = "backslashreplace"  # a lone surrogate, which UTF-8 cannot hold, becomes its JSON escape


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; both become null, at any depth."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def dump_line(row: Mapping[str, Any], ascii_only: bool = False) -> str:
    r"""``row`` as one line of strict JSON, if need be of ASCII. What JSON cannot hold is written as its ``str``.

    >>> dump_line({"reward": 0.5, "log_probs": [-1.0, float("nan")]})
    '{"reward": 0.5, "log_probs": [-1.0, null]}\n'
    """
    try:
        return json.dumps(dict(row), ensure_ascii=ascii_only, default=str, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_finite(row), ensure_ascii=ascii_only, default=str) + "\n"


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add ``rows`` at the end and flush, so that a killed run loses no finished step.

    Raises ``WriteFailed`` if the disk is full, or cannot be written for another reason.
    """
    with naming_disk(path), path.open("a", encoding="utf-8", errors=_ERRORS) as file:
        file.writelines(dump_line(row) for row in rows)


def read(path: Path, key: str) -> list[dict[str, Any]]:
    """All rows; none when there is no file. A last line without its newline is still being written and is left out.

    Raises ``ValueError`` naming file and line when another line is not a JSON object with a whole number as ``key``.
    """
    if not path.is_file():
        return []
    complete = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    rows = [parse_line(line, path, number) for number, line in enumerate(complete, 1)]
    for number, row in enumerate(rows, 1):
        if type(row.get(key)) is not int:
            raise ValueError(f"{path}:{number}: has no whole number as {key!r}; remove the line or the file")
    return rows


def parse_line(line: str, path: Path, number: int | str) -> dict[str, Any]:
    """Parse one line. Raises ``ValueError`` naming the file and ``number`` when it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise ValueError(f"{path}:{number}: not JSON ({error}); remove the line or the file") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path}:{number}: {line[:60]} is not a JSON object; remove the line or the file")
    return row


def drop_from(path: Path, key: str, limit: int) -> int | None:
    """Remove the rows whose ``row[key] >= limit`` and an unfinished last line; give the largest key that is left.

    None if no row is left.

    Raises:
        ValueError: A line is damaged; the message names it or its file.
        WriteFailed: As ``append`` does; the file is as it was then.
    """
    if not path.is_file():
        return None
    rows = read(path, key)
    kept = [row for row in rows if row[key] < limit]
    replacement = path.with_name(path.name + ".new")  # renamed into place: a kill here loses neither file
    with naming_disk(path, replacement):
        replacement.write_text("".join(map(dump_line, kept)), encoding="utf-8", errors=_ERRORS)
        os.replace(replacement, path)
    return max((row[key] for row in kept), default=None)
