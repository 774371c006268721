"""Read the command line into ``Settings``. Imports neither torch nor Ray, so that a wrong flag is reported at once."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, get_type_hints

# A private name of a pinned version (argparse-dataclass 2.0): the public entry points take one dataclass, not many.
from argparse_dataclass import _add_dataclass_options

import miles
from miles.arguments.explain import explain
from miles.arguments.megatron.fields import DESTINATION, add_megatron_flags
from miles.arguments.settings import Settings
from miles.arguments.sglang.server_flags import ServerFlags, split_server_flags
from miles.arguments.validate import Validated, validate
from miles.flags import Errors, FlagError

# The sections of our own flags; flags that are passed on to SGLang or Megatron have none.
SECTIONS: dict[str, type] = {
    name: hint
    for name, hint in get_type_hints(Settings).items()
    if hasattr(hint, "__dataclass_fields__") and hint is not ServerFlags
}

# argparse's messages -> flag, value, rule and way out
REPHRASED = (
    (r"^argument ", ""),
    (r"^(\S+): invalid (int|float) value: '(.*)'$", r"\1 \3: must be a number (\2); correct the value"),
    (r"^(\S+): invalid choice: '(.*)' \(choose from (.*)\)$", r"\1 \2: no such choice; give one of \3"),
    (r"^(\S+): (expected .*)$", r"\1: \2; write a value that starts with a minus as \1=VALUE"),
    (r"^\[Errno \d+\] (.*): '(.*)'$", r"@\2: the file of flags cannot be read (\1); check the path"),
)


class FlagParser(argparse.ArgumentParser):
    """Parse as argparse does, but collect errors, raise ``FlagError`` instead of exiting, and suggest near flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.errors = Errors()

    def error(self, message: str) -> NoReturn:
        """Raise ``FlagError`` with the errors so far, and with this one, after which the words cannot be read on."""
        self.errors.add(_rephrased(message))
        raise FlagError(*self.errors.messages)

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """Split a line of an ``@file`` into words: quoting as in a shell, ``#`` starts a comment."""
        try:
            return shlex.split(arg_line, comments=True)
        except ValueError as error:
            self.error(f"cannot read the line {arg_line!r} of the @file: {error}; check its quotes")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Read the words of a command line.

        Raises:
            FlagError: With all wrong values and all flags that do not exist; these get a suggestion.
        """
        self.errors = Errors()
        found, unknown = self.parse_known_args(words)
        for message in self._describe_unknown(unknown):
            self.errors.add(message)
        self.errors.raise_if_any()
        return found

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Convert the words of one flag; a wrong value is added to ``errors`` and leaves the default."""
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self.errors.add(_rephrased(str(error)))
            return action.default

    def _describe_unknown(self, words: Sequence[str]) -> list[str]:
        flags = [word.split("=")[0] for word in words if word.startswith("-")]
        if words and not flags:
            return [f"the word {words[0]!r} belongs to no flag; every setting is written --flag value"]
        return [self._describe_unknown_flag(flag) for flag in flags]

    def _describe_unknown_flag(self, flag: str) -> str:
        nearest = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.5)
        way_out = f"did you mean {nearest[0]}?" if nearest else "--help lists all flags"
        return f"{flag}: no such flag; {way_out}"


def _rephrased(message: str) -> str:
    for pattern, sentence in REPHRASED:
        message = re.sub(pattern, sentence, message)
    return message


class DefaultsFormatter(argparse.HelpFormatter):
    """Format help texts so that they end with the default of the flag, which only the dataclasses know."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44, width=120)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = defaults().get(action.dest)
        shown = default is not None and default is not False
        return f"{text} (default: {default})".replace("%", "%%") if shown else text


def defaults() -> dict[str, Any]:
    """Return the default of every flag, by field name. Names are unique over all sections."""
    return {field.name: field.default for section in SECTIONS.values() for field in dataclasses.fields(section)}


def section_title(section: type) -> tuple[str, str]:
    """Return title and description of a section: its docstring before and after the colon."""
    title, _, description = (section.__doc__ or "").partition(":")
    return title.strip(), description.strip()


def build_parser() -> FlagParser:
    """Build the parser of ``train.py``: one group per section of ``Settings``, and ``--explain`` and ``--version``."""
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
        _add_dataclass_options(section, group)
    return parser


def parse(argv: Sequence[str]) -> Settings:
    """Read the flags; nothing is validated yet.

    Raises:
        FlagError: The words are no flags, or values have the wrong type.
    """
    return _settings(*_read(argv))


def _add_chosen_backend(parser: FlagParser, words: Sequence[str]) -> None:
    """Add the flags of Megatron's own dataclasses if ``words`` choose that backend."""
    chosen, _ = parser.parse_known_args([word for word in words if word not in ("-h", "--help", "--version")])
    if chosen.train_backend == "megatron":
        group = parser.add_argument_group("megatron-core", "fields of its own configuration, by their names there")
        add_megatron_flags(group, taken={*defaults(), *parser._option_string_actions})


def _read(argv: Sequence[str]) -> tuple[argparse.Namespace, ServerFlags]:
    """Read the flags of our own sections (and Megatron's, if it is chosen), and those that are passed on to SGLang."""
    parser = build_parser()
    # argparse's private name: files of flags must be read before SGLang's flags are separated from ours.
    words = parser._read_args_from_files(list(argv))
    ours, passed_on = split_server_flags(words, parser._option_string_actions)
    _add_chosen_backend(parser, ours)
    return parser.read(ours), passed_on


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
    """Parse and validate for a program.

    Wrong flags are printed to stderr, all of them, and the program exits with 2. ``--explain``, ``--help`` and
    ``--version`` print to stdout and exit with 0.
    """
    try:
        namespace, passed_on = _read(argv)
        validated = validate(_settings(namespace, passed_on))
    except FlagError as error:
        print(report(error.messages), file=sys.stderr)
        raise SystemExit(2) from None
    except ValueError as error:
        print(report([str(error)]), file=sys.stderr)
        raise SystemExit(2) from None
    if namespace.explain:
        print(explain(validated))
        raise SystemExit(0)
    return validated


def report(messages: Sequence[str]) -> str:
    """Return the text that reports errors: one line, or a list with one line per error."""
    if len(messages) == 1:
        return f"train.py: error: {messages[0]}"
    return "\n".join([f"train.py: {len(messages)} errors in the flags:", *(f"  {message}" for message in messages)])
