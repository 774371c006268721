"""From words on the command line to ``Settings``. Imports neither torch nor Ray: a wrong flag is told at once."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, get_type_hints

# A private name of a pinned version (argparse-dataclass 2.0): the public entry points take one dataclass, not eleven.
from argparse_dataclass import _add_dataclass_options

import miles
from miles.arguments.explain import explain
from miles.arguments.megatron.fields import DESTINATION, add_megatron_flags
from miles.arguments.settings import Settings
from miles.arguments.sglang.server_flags import split_server_flags
from miles.arguments.sglang.settings import ServerFlags
from miles.arguments.validate import Validated, validate

# Those of our own flags; what is passed on to SGLang or Megatron has none.
SECTIONS: dict[str, type] = {
    name: hint
    for name, hint in get_type_hints(Settings).items()
    if hasattr(hint, "__dataclass_fields__") and hint is not ServerFlags
}


# argparse's own words -> flag, value, rule and way out
REPHRASED = (
    (r"^argument ", ""),
    (r"^(\S+): invalid (int|float) value: '(.*)'$", r"\1 \3: must be a number (\2); correct the value"),
    (r"^(\S+): invalid choice: '(.*)' \(choose from (.*)\)$", r"\1 \2: no such choice; give one of \3"),
    (r"^(\S+): (expected .*)$", r"\1: \2; a value that starts with a minus is written \1=VALUE"),
    (r"^\[Errno \d+\] (.*): '(.*)'$", r"@\2: the file of flags cannot be read (\1); check the path"),
)


class FlagError(ValueError):
    """The command line cannot be read; the message names the flag, what is wrong with it and the way out."""


class FlagParser(argparse.ArgumentParser):
    """argparse that raises ``FlagError`` instead of exiting, suggests the nearest flag, and reads ``@file``."""

    def error(self, message: str) -> NoReturn:
        for pattern, sentence in REPHRASED:
            message = re.sub(pattern, sentence, message)
        raise FlagError(message)

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """Words of one line of an ``@file``: quoting as in a shell, ``#`` starts a comment."""
        try:
            return shlex.split(arg_line, comments=True)
        except ValueError as error:
            self.error(f"cannot read the line {arg_line!r} of the @file: {error}; check its quotes")

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def, override]
        """As argparse's, with a suggestion for a flag that does not exist."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._describe_unknown(unknown))
        return found

    def _describe_unknown(self, words: Sequence[str]) -> str:
        flags = [word.split("=")[0] for word in words if word.startswith("-")]
        if not flags:
            return f"the word {words[0]!r} belongs to no flag; every setting is written --flag value"
        nearest = difflib.get_close_matches(flags[0], self._option_string_actions, n=1, cutoff=0.5)
        way_out = f"did you mean {nearest[0]}?" if nearest else "--help lists all flags"
        return f"{flags[0]}: no such flag; {way_out}"


class DefaultsFormatter(argparse.HelpFormatter):
    """Help that ends with each flag's default, read from the dataclasses (argparse itself is not told them)."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44, width=120)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = defaults().get(action.dest)
        shown = default is not None and default is not False
        return f"{text} (default: {default})".replace("%", "%%") if shown else text


def defaults() -> dict[str, Any]:
    """The default of every flag, by field name. Names are unique over all sections."""
    return {field.name: field.default for section in SECTIONS.values() for field in dataclasses.fields(section)}


def section_title(section: type) -> tuple[str, str]:
    """Title and description of a section: its docstring reads ``title: description.``"""
    title, _, description = (section.__doc__ or "").partition(":")
    return title.strip(), description.strip()


def build_parser() -> FlagParser:
    """The parser of ``train.py``: one group a section of ``Settings``, and ``--explain`` and ``--version``."""
    parser = FlagParser(
        prog="train.py",
        usage="%(prog)s --flag value ... [@file]",
        description="Reinforcement-learning post-training of language models. @file reads flags from a file.",
        fromfile_prefix_chars="@",
        formatter_class=DefaultsFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--explain", action="store_true", help="print what this command would do, then stop")
    parser.add_argument("--version", action="version", version=f"miles {miles.__version__}")
    for section in SECTIONS.values():
        group = parser.add_argument_group(*section_title(section))
        _add_dataclass_options(section, group)  # type: ignore[arg-type]  # a group has add_argument too
    return parser


def parse(argv: Sequence[str]) -> Settings:
    """Read the flags; nothing is checked across sections yet. Raises ``FlagError``, a ``ValueError``."""
    return _settings(*_read(argv))


def _add_chosen_backend(parser: FlagParser, words: Sequence[str]) -> None:
    """Add the flags of Megatron's own dataclasses where ``words`` choose that backend."""
    chosen, _ = parser.parse_known_args([word for word in words if word not in ("-h", "--help", "--version")])
    if chosen.train_backend == "megatron":
        group = parser.add_argument_group("megatron-core", "fields of its own configuration, by their names there")
        add_megatron_flags(group, taken={*defaults(), *parser._option_string_actions})


def _read(argv: Sequence[str]) -> tuple[argparse.Namespace, ServerFlags]:
    """The flags of our own sections, with Megatron's where it is chosen, and those that are passed on to SGLang."""
    parser = build_parser()
    # argparse's private name: the words of an @file must be there before SGLang's are told from ours.
    words = parser._read_args_from_files(list(argv))
    ours, passed_on = split_server_flags(words, parser._option_string_actions)
    _add_chosen_backend(parser, ours)
    return parser.parse_args(ours), passed_on


def _settings(namespace: argparse.Namespace, passed_on: ServerFlags) -> Settings:
    given = {name: value for name, value in vars(namespace).items() if value is not dataclasses.MISSING}

    def section(cls: type) -> Any:
        values = {field.name: given[field.name] for field in dataclasses.fields(cls) if field.name in given}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})

    own = {name.removeprefix(DESTINATION): value for name, value in given.items() if name.startswith(DESTINATION)}
    megatron_overrides = tuple((name, value) for name, value in own.items() if value is not None)
    sections = {name: section(cls) for name, cls in SECTIONS.items()}
    return Settings(**sections, megatron_overrides=megatron_overrides, server_flags=passed_on)


def main_parse(argv: Sequence[str]) -> Validated:
    """Parse and validate for a program: a wrong flag prints one line to stderr and exits with 2.

    ``--explain``, ``--help`` and ``--version`` print to stdout and exit with 0.
    """
    try:
        namespace, passed_on = _read(argv)
        validated = validate(_settings(namespace, passed_on))
    except ValueError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if namespace.explain:
        print(explain(validated))
        raise SystemExit(0)
    return validated
