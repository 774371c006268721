"""Describe a trainer in one file of this folder, and find the trainer that a file of settings belongs to."""

import importlib
import pkgutil
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from miles.base.flags import flag_name
from miles.compat.translate import launchers
from miles.compat.translate.translation import (
    Document,
    Expression,
    ForeignObjective,
    Table,
    Translation,
    sequence_mean,
    table_of,
    token_mean_counting_masked,
)
from miles.compat.verdicts import FOREIGN_FLAGS
from miles.config.megatron.fields import installed_fields
from miles.config.settings import section_of


class Launcher(ABC):
    """Describe one trainer. Objects have no state.

    Attributes:
        name: The value of ``--from``, and the name of its table alongside its file.
        reads: The kinds of files that it is configured by.
    """

    name: str
    reads: tuple[str, ...]

    def table(self) -> Table:
        """Return the trainer's settings and defaults."""
        return table_of(self.name)

    @abstractmethod
    def recognizes(self, document: Document) -> bool:
        """Return whether a file of one of these kinds is a configuration of this trainer."""

    @abstractmethod
    def translate(self, translation: Translation) -> ForeignObjective | None:
        """Record what becomes of the settings, and return their objective; ``None`` if it is not known."""


def all_launchers() -> dict[str, Launcher]:
    """Return the trainers by name, from the files of this folder."""
    by_name = dict[str, Launcher]()
    for file in sorted(module.name for module in pkgutil.iter_modules(launchers.__path__)):
        module = importlib.import_module(f"{launchers.__name__}.{file}")
        for value in vars(module).values():
            if isinstance(value, Launcher):
                by_name[value.name] = value
    return by_name


def refuse_other_methods(document: Document) -> None:
    """Refuse a file that trains without RL, or with another trainer of TRL than GRPO, by the name of its method.

    Raises:
        InputError: It trains on pairs or demonstrations, or a reward model, or generates, or is TRL's RLOO.
    """
    table = tomllib.loads(Path(__file__).parents[1].joinpath("not_rl.toml").read_text(encoding="utf-8"))
    names = (*document.words, *document.settings)
    if any(re.match(table["rl"], name) for name in names):
        return
    _refuse(document, table["trl"], "GRPO is the one trainer of TRL that is translated")
    if not any(re.match(table["grpo"], name) for name in names):
        demonstrations = "(--loss-type sft_loss trains on demonstrations here)"
        _refuse(document, table, f"only reinforcement learning is translated {demonstrations}")


def _refuse(document: Document, table: Mapping[str, Any], rule: str) -> None:
    """Refuse a file with a word, a setting or a name that matches a pattern of ``table``."""
    words = (*document.words, *map(" ".join, pairwise(document.words)))
    sought = {"words": words, "settings": tuple(document.settings), "files": (Path(document.path).name,)}
    for kind, texts in sought.items():
        for pattern, what in table.get(kind, {}).items():
            match = next((text for text in texts if re.search(pattern, text)), None)
            if match is not None:
                setting = document.settings.get(match)
                document.fail(None if setting is None else setting.line, f"{match} is {what}, and {rule}")


def launcher_of(document: Document, name: str | None) -> Launcher:
    """Return the trainer called ``name``, or the one that recognizes the file.

    Raises:
        InputError: The trainer is not configured by such files, or not exactly one recognizes the file.
    """
    known = all_launchers()
    refuse_other_methods(document)
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


# Read the command lines of slime and miles, whose flags are ours or have a verdict in ``compat/tables``.


REDUCER = "--custom-pg-loss-reducer-function-path"


class CommandLine(Launcher):
    """A launcher with this command line."""

    reads = ("shell",)
    version: str
    source: str

    def runs_train(self, document: Document) -> bool:
        """Return whether the command is one of ``train.py``."""
        return any(re.search(r"(^|/)train(_async)?\.py$", word) for word in document.words)

    def table(self) -> Table:
        """Return a table without rows: their flags are ours, or have a verdict here."""
        return Table(self.version, self.source, (), {})

    def translate(self, translation: Translation) -> ForeignObjective:
        """Sort the flags by their verdict here."""
        our_flags = {*map(flag_name, section_of()), *(field.flag for field in installed_fields())}
        ahead = any(word.endswith("train_async.py") for word in translation.document.words)
        if ahead and not translation.has("--async-steps"):
            translation.carry("train_async.py", "--async-steps", 1)
        for flag, setting in translation.document.settings.items():
            value = setting.value
            if isinstance(value, Expression):
                continue
            elif flag in FOREIGN_FLAGS:
                row = FOREIGN_FLAGS[flag]
                if row.heading is None:
                    translation.miss(flag, f"{row.why}; {row.instead}")
                else:
                    translation.carry(flag, *_words(flag, value))  # accepted, without effect
            elif flag in our_flags or flag.startswith(("--sglang-", "--router-")):
                translation.carry(flag, *_words(flag, value))
        return self._objective(translation)

    def _objective(self, translation: Translation) -> ForeignObjective:
        if translation.has(REDUCER):
            translation.carry(REDUCER, why="it replaces the aggregation of pg_loss, and is not evaluated here", worst=0)
        if translation.has("--calculate-per-token-loss"):
            return ForeignObjective(
                "--calculate-per-token-loss",
                "Σ m l / Σ_i max(M_i, 1)",
                self.source,
                token_mean_counting_masked,
                "token_mean",
                ("--loss-aggregation", "token_mean"),
                depends="fully masked samples: each adds one token to the divisor",
                exact=False,
            )
        formula = "1/N Σ_r 1/max(M_r, 1) Σ m l"
        words = ("--loss-aggregation", "sample_mean")
        return ForeignObjective("default", formula, self.source, sequence_mean, "sample_mean", words)


def _words(flag: str, value: object) -> list[object]:
    if value is True:
        return [flag]
    return [flag, *(value if isinstance(value, list) else [value])]
