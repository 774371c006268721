"""Check that the rows of prompts have the columns that flags name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from miles.base import strict_json
from miles.base.flags import Errors, flag_name
from miles.config.settings import Settings
from miles.tasks.data.settings import columns_to_choose, find_column

LONGEST_LINE = 2**20  # bytes that are read of a file


def check_columns(settings: Settings, errors: Errors) -> None:
    """Refuse a column that the first line of a file of JSON lines lacks. Other forms need a library to be read.

    Loading reports a line that cannot be read, and a column that a later line lacks.
    """
    if not errors.none_about("rm_type"):  # the reward decides whether rows need labels
        return
    for source, own, field, name in _columns(settings):
        row = _first_row(source) if errors.none_about(field) else None
        if row is not None and name not in row and find_column(row, name) is None:
            rule = f"the first line of {source} has no such column"
            errors.refuse(field, name, rule, f"{columns_to_choose(row, name)}; choose one with {flag_name(own)}")


def _columns(settings: Settings) -> Iterator[tuple[str, str, str, str]]:
    """Yield what every row needs: source, the flag that can choose the column, the flag that has chosen it, its name.

    The columns of evaluation are those of training if no flag of its own chooses them.
    """
    data, evaluation = settings.data, settings.evaluation
    keys = ["input_key"] if settings.reward.labels_optional else ["input_key", "label_key"]
    if not settings.rollout.loads_samples and data.data_source_path is None:
        for source in (data.prompt_data,) if data.prompt_mix is None else data.prompt_mix[1::2]:
            for key in keys[:1] if settings.reads_conversations else keys:
                name = getattr(data, key)
                if source is not None and name is not None:
                    yield source, key, key, name
    for source in (evaluation.eval_prompt_data or ())[1::2]:
        for key in keys:
            own = f"eval_{key}"
            chosen = key if getattr(evaluation, own) is None else own
            name = getattr(data if chosen == key else evaluation, chosen)
            if name is not None:
                yield source, own, chosen, name


def _first_row(source: str) -> dict[str, Any] | None:
    """Return the first line of a file that is not empty; None if it cannot be read, or is no object."""
    if not source.endswith(".jsonl") or not os.path.isfile(source):
        return None
    try:
        with open(source, "rb") as lines:
            while (line := lines.readline(LONGEST_LINE)).isspace():
                continue
        row = strict_json.loads(line.decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError, strict_json.StrictJsonError):
        return None
    return row if isinstance(row, dict) else None
