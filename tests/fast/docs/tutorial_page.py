"""Read the code blocks of a tutorial, and run them in order in a folder, as a reader does.

| block | what is done with it |
|---|---|
| any language with ``title="FILE"`` | written to FILE |
| ``bash``, ``python`` | run; it must end with status 0 |
| ``text`` | lines of the output of the block before it, in order; ``…`` stands for any text within a line |
| ``console`` | an output that depends on the machine or on chance: not compared |
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.notebooks import FENCE

REPO = Path(__file__).resolve().parents[3]
INTERPRETERS = {"bash": ("bash", "-euo", "pipefail", "-c"), "python": (sys.executable, "-c")}

# The command of a tutorial's reader. Flags of TUTORIAL_FLAGS come last, and win.
MILES = """#!/usr/bin/env bash
case "$1" in train | quickstart) set -- "$@" $TUTORIAL_FLAGS ;; esac
exec "$TUTORIAL_PYTHON" -m miles "$@"
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: its page and line, its language, the file that it is to be written to, its text."""

    place: str
    language: str
    title: str | None
    text: str


def read_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page.

    Raises:
        ValueError: A fence is not closed, or a block has a language that the table above does not name.
    """
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in FENCE.finditer(text):
        place = f"{page.name}:{text[: match.start()].count(chr(10)) + 1}"
        block = Block(place, match["language"], match["title"], match["text"])
        if block.title is None and block.language not in {*INTERPRETERS, "text", "console"}:
            raise ValueError(f"{place}: a block of {block.language or 'no language'} is neither run nor compared")
        blocks.append(block)
    if text.count("\n```") != 2 * len(blocks):
        raise ValueError(f"{page.name}: a fence is indented or not closed")
    return blocks


def run_page(page: Path, folder: Path, short_flags: str = "") -> None:
    """Write the files of a page into ``folder``, run its commands there, and compare their outputs.

    Args:
        page: The tutorial.
        folder: The reader's folder.
        short_flags: Further flags of ``miles train`` and ``miles quickstart``, which shorten a run.
    """
    environ = reader_environment(folder, short_flags)
    output = ""
    for block in read_blocks(page):
        if block.title is not None:
            file = folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
        elif block.language in INTERPRETERS:
            ended = subprocess.run(
                [*INTERPRETERS[block.language], block.text],
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            output = ended.stdout
            assert ended.returncode == 0, f"{block.place} ended with status {ended.returncode}:\n{block.text}\n{output}"
        elif block.language == "text":
            lacking = missing_line(block.text, output)
            assert lacking is None, f"{block.place}: the output has no line {lacking!r} there:\n{output}"


def reader_environment(folder: Path, short_flags: str) -> dict[str, str]:
    """Return the environment of a reader, where the command ``miles`` is this checkout's."""
    commands = folder / ".commands"
    commands.mkdir(exist_ok=True)
    (commands / "miles").write_text(MILES)
    (commands / "miles").chmod(0o755)
    return os.environ | {
        "PATH": os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(REPO),
        "TUTORIAL_PYTHON": sys.executable,
        "TUTORIAL_FLAGS": short_flags,
        "OMP_NUM_THREADS": "1",
    }


def missing_line(expected: str, output: str) -> str | None:
    """Return the first line of ``expected`` that ``output`` lacks after the lines before it; None if it has all."""
    lines = iter(output.splitlines())
    for line in expected.splitlines():
        pattern = ".*".join(map(re.escape, line.rstrip().split("…")))
        if not any(re.fullmatch(pattern, candidate.rstrip()) for candidate in lines):
            return line
    return None
