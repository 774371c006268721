"""Make the page of flags of the built docs; ``python -m scripts.pages.flags`` prints it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from miles.base.flags import flag_choices, flag_name, flag_rules
from miles.config.parser import section_title
from miles.config.settings import SECTIONS


def flags_reference() -> str:
    """Return a markdown page of every flag, by section, with its default and its help."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Flags"
    yield ""
    yield "`--config FILE` reads settings from YAML ([Configuration files](commands.md#configuration-files))."
    yield "`@file` reads flags from a file: lines of flags with `#` comments, or a shell array that scripts source."
    yield "`--explain` describes the run of a command, `--version` prints the version, `--help` this list. The last"
    yield "value of a flag counts. All errors in a command are reported together, one per line, with exit code 2. Flags"
    yield "without effect are accepted with a note, and refused with `--strict-flags`."
    yield "[Launch scripts](launch-scripts.md) lists the flags of related launchers."
    for section in SECTIONS.values():
        title, description = section_title(section)
        yield from ("", f"## {title}", "", description[:1].upper() + description[1:])
        yield from ("", "| flag | default | meaning |", "|---|---|---|")
        yield from (_row(field) for field in dataclasses.fields(section))


def _row(field: dataclasses.Field[Any]) -> str:
    choices = flag_choices(field)
    text = field.metadata["help"] + (f" ({', '.join(choices)})" if choices else "")
    text += "".join(f"; {rule}" for rule in flag_rules(field))
    if field.default is None:
        default = ""
    elif isinstance(field.default, bool):
        default = "on" if field.default else "off"
    else:
        default = f"`{field.default}`".replace("\n", "\\n")  # a row is one line
    return f"| `{flag_name(field.name)}` | {default} | {text.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    print(flags_reference(), end="")
