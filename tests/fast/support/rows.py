"""Read the rows of a table of cases from the YAML file of a test."""

from pathlib import Path
from typing import Any

import yaml


def rows(test: str, table: str) -> list[Any]:
    """Return the rows of ``table`` in the YAML file next to ``test``, which is the ``__file__`` of a test."""
    tables: dict[str, list[Any]] = yaml.safe_load(Path(test).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tables[table]
