"""Make a Jupyter notebook of a lesson: its text, its files and its commands, in their order.

    python -m scripts.notebooks docs/tutorials/first-run.md > first-run.ipynb

A block with ``title="FILE"`` becomes a cell that writes the file; ``bash`` and ``python`` become cells that run; the
outputs that the lesson shows stay text. The site has the notebook of each lesson (docs_hooks.py).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FENCE = re.compile(r'^```(?P<language>[^\s`]*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.M | re.S)
STARTS = {"bash": "%%script bash -euo pipefail\n", "python": ""}


def notebook(lesson: str) -> str:
    """Return the notebook, as JSON of its format 4.5."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [{"id": f"cell-{number}", **cell} for number, cell in enumerate(_cells(lesson))]
    return json.dumps(
        {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}, indent=1
    )


def _cells(lesson: str) -> Iterator[dict[str, Any]]:
    end = 0
    for block in FENCE.finditer(lesson):
        if block["title"] is None and block["language"] not in STARTS:
            continue  # an output: text
        yield from _text(lesson[end : block.start()])
        end = block.end()
        start = f"%%writefile {block['title']}\n" if block["title"] is not None else STARTS[block["language"]]
        source = (start + block["text"].rstrip("\n")).splitlines(keepends=True)
        yield {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
    yield from _text(lesson[end:])


def _text(markdown: str) -> Iterator[dict[str, Any]]:
    if markdown.strip():
        yield {"cell_type": "markdown", "metadata": {}, "source": markdown.strip().splitlines(keepends=True)}


if __name__ == "__main__":
    print(notebook(Path(sys.argv[1]).read_text(encoding="utf-8")))
