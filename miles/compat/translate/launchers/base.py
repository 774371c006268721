"""Describe a trainer in one file of this folder, and find the trainer that a file of settings belongs to."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod

from miles.compat.translate import launchers
from miles.compat.translate.objective import Objective
from miles.compat.translate.translation import Document, Translation


class Launcher(ABC):
    """Describe one trainer. Objects have no state.

    Attributes:
        name: The value of ``--from``.
        version: The version or the commit whose source was read.
        reads: The kinds of files that it is configured by.
    """

    name: str
    version: str
    reads: tuple[str, ...]

    @abstractmethod
    def recognizes(self, document: Document) -> bool:
        """Return whether a file of one of these kinds is a configuration of this trainer."""

    @abstractmethod
    def translate(self, translation: Translation) -> Objective:
        """Record what becomes of the settings, and return the objective that they ask for."""


def all_launchers() -> dict[str, Launcher]:
    """Return the trainers by name, from the files of this folder."""
    by_name = dict[str, Launcher]()
    for file in sorted(module.name for module in pkgutil.iter_modules(launchers.__path__)):
        module = importlib.import_module(f"{launchers.__name__}.{file}")
        for value in vars(module).values():
            if isinstance(value, Launcher):
                by_name[value.name] = value
    return by_name


def launcher_of(document: Document, name: str | None) -> Launcher:
    """Return the trainer called ``name``, or the one that recognizes the file.

    Raises:
        InputError: The trainer is not configured by such files, or not exactly one recognizes the file.
    """
    known = all_launchers()
    if name is not None:
        if document.kind not in known[name].reads:
            kinds = " or ".join(known[name].reads)
            document.fail(None, f"--from {name} reads {kinds}, and this is {document.kind}; give another file or name")
        return known[name]
    fitting = [one for one in known.values() if document.kind in one.reads and one.recognizes(document)]
    if len(fitting) != 1:
        names = ", ".join(one.name for one in fitting or known.values())
        fault = "fits more than one trainer" if fitting else "fits no trainer that is known here"
        document.fail(1, f"{fault}; add --from with one of {names}")
    return fitting[0]
