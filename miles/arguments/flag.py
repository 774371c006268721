"""How a section declares one flag: a dataclass field whose metadata argparse-dataclass reads."""

import dataclasses
from typing import Any


def flag(default: Any, help: str, **metadata: Any) -> Any:
    """A field with a default and a help text; ``metadata`` may hold args, choices, nargs, metavar, type.

    Section modules must not use ``from __future__ import annotations``: argparse-dataclass reads the types as objects.
    """
    return dataclasses.field(default=default, metadata={"help": help, **metadata})
