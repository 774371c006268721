"""Check that the prompts have the columns that flags name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles import strict_json
from miles.arguments.settings import Settings
from miles.flags import Errors
from miles.one_line import one_line


def check_columns(settings: Settings, errors: Errors) -> None:
    """Refuse a column that the first line of a file of JSON lines lacks. Other forms need a library to be read."""
    if settings.rollout.loads_samples or settings.data.data_source_path is not None:
        return
    names = {"input_key": settings.data.input_key}
    may_lack_labels = settings.reads_conversations or settings.reward.labels_optional  # a later row may have one
    if settings.data.label_key is not None and not may_lack_labels:
        names["label_key"] = settings.data.label_key
    given = settings.data.prompt_mix
    sources = (settings.data.prompt_data,) if given is None else given[1::2]
    for file in [source for source in sources if source is not None and source.endswith(".jsonl")]:
        row = _first_row(Path(file))
        if row is None:
            continue
        for field, name in names.items():
            if name not in row and name.partition(".")[0] not in row and errors.none_about(field):
                has = one_line(", ".join(row), 500) or "none"
                errors.refuse(field, name, f"the first line of {file} has no such column", f"its columns are: {has}")


def _first_row(file: Path) -> dict[str, Any] | None:
    """Return the first line that is not empty; None if it cannot be read: loading the file reports that."""
    try:
        with file.open("rb") as lines:
            line = next((line for line in lines if line.strip()), b"")
        row = strict_json.loads(line.decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError, strict_json.StrictJsonError):
        return None
    return row if isinstance(row, dict) else None
