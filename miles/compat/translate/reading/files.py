"""Choose the reader of a file by its suffix."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from miles.compat.translate.reading.python_call import read_python
from miles.compat.translate.reading.shell import read_shell
from miles.compat.translate.reading.tables import read_json, read_toml, read_yaml
from miles.compat.translate.reading.text import read_text
from miles.compat.translate.settings import Document, fail

PACKAGED = ("ppo_trainer", "ppo_megatron_trainer")  # verl's own, whose defaults the table has

READERS = {
    ".json": read_json,
    ".yaml": read_yaml,
    ".yml": read_yaml,
    ".toml": read_toml,
    ".py": read_python,
    ".sh": read_shell,
    ".bash": read_shell,
}


def read_document(path: str) -> Document:
    """Read a file of settings.

    Raises:
        InputError: The file cannot be read, or is not what its suffix says: one sentence with file and line.
    """
    suffix = Path(path).suffix.lower()
    if os.path.isdir(path):
        fail(path, None, f"is a folder; give a file in it that ends in {', '.join(READERS)}")
    if not os.path.exists(path):
        fail(path, None, "no such file; check the path")
    if suffix not in READERS:
        fail(path, None, f"the suffix {suffix!r} is not known; give a file that ends in {', '.join(READERS)}")
    document = READERS[suffix](path, read_text(path))
    names_another = document.kind == "shell" and "--config-name" in document.settings
    return _with_config(document) if names_another else document


def _with_config(document: Document) -> Document:
    """Return a command of Hydra with the settings of the file that it names; overrides in the command win."""
    named = document.settings["--config-name"]
    name = str(named.value).removesuffix(".yaml")
    if name in PACKAGED:
        return document
    place = document.settings.get("--config-path")
    folder = "." if place is None else str(place.value)
    found = (base / folder / f"{name}.yaml" for base in (Path(document.path).parent, Path()))
    file = next((path for path in found if os.path.isfile(path)), None)  # false for a name that no file can have
    if file is None:
        document.fail(
            named.line,
            f"--config-name {name}: there is no {Path(folder) / name}.yaml, whose settings the command overrides; give "
            "its folder as --config-path, or drop --config-name to start from the defaults of verl",
        )
    below = {key: replace(each, line=None) for key, each in read_document(str(file)).settings.items()}
    return replace(document, settings={**below, **document.settings})
