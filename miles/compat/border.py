"""The border: a command of any launcher becomes a command of miles, which ``config`` then parses and judges.

::

    words ── @files, --config ──> rewrite ── our words ──> parse, choose ── Command ──> judge ── Validated
              config/parser.py    notes on foreign words    config/parser.py             with ``notes``

``rewrite`` knows the words only. ``notes`` judges the foreign flags whose effect depends on the settings of the run.
"""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from miles.base.flags import LONGEST_VALUE, Errors, FlagError, flag_name
from miles.base.text import one_line
from miles.compat.spellings import COUNTERPARTS, READERS, Line, check_reference, read_settings_of_file, remarks
from miles.compat.verdicts import FOREIGN_FLAGS
from miles.config import files, parser
from miles.config.functions import CUSTOM_CONFIG, names_functions
from miles.config.notes import OTHERS, Note, report
from miles.config.parser import Command, judge, judge_with_hub, judge_without_hub, with_inputs
from miles.config.servers.passed_on import is_passed_on
from miles.config.settings import Settings, section_of
from miles.config.spelling import cut_spaced_words, group_words, repeated_flags
from miles.config.validate import Validated

# Flags that exist elsewhere, and what to add if one of them is suggested.
ELSEWHERE = {
    flag: f" It is refused here: {row.instead}" if row.verdict == "refused" else ""
    for flag, row in FOREIGN_FLAGS.items()
}


def rewrite(words: Sequence[str], errors: Errors) -> Line:
    """Read the words of other launchers as ours.

    Args:
        words: The words of a command, without any ``@file`` or ``--config``.
        errors: Collects what cannot be obeyed, whatever the settings of the run are.
    """
    line = Line(list(words), errors)
    read_settings_of_file(line, _known_flags)
    line.words = cut_spaced_words(line.words, {*_known_flags(line.words), *COUNTERPARTS})
    line.notes += repeated_flags(line.words)
    for read in READERS:
        read(line)
    return line


def _known_flags(words: Sequence[str]) -> Collection[str]:
    """Return the flags that exist, with those among ``words`` that are passed on to servers."""
    passed_on = set(filter(is_passed_on, words))
    return parser.known_flags(words, FOREIGN_FLAGS) | FOREIGN_FLAGS.keys() | passed_on


def notes(settings: Settings, errors: Errors, rewritten: Line) -> list[Note]:
    """Judge what was rewritten, with the settings of the run.

    Args:
        settings: What our own words say.
        errors: Collects what would change the result, and cannot be obeyed.
        rewritten: The command.

    Returns:
        A note on every foreign flag that changes nothing.
    """
    foreign = rewritten.foreign
    judged = [FOREIGN_FLAGS[flag].judge(value, settings, foreign, errors) for flag, value in foreign.items()]
    check_reference(settings, errors)
    if rewritten.names_for_functions and not names_functions(settings):
        names = one_line(", ".join(rewritten.names_for_functions), LONGEST_VALUE)
        errors.add(
            f"{CUSTOM_CONFIG} {settings.rollout.custom_config_path}: no flags are named {names}, and no function of "
            "yours reads them; correct the names, or drop them"
        )
    return [note for note in judged if note is not None]


def read_command(argv: Sequence[str], keywords: Mapping[str, Any] | None = None) -> Command:
    """Read the flags of our own sections, of Megatron, of SGLang, and of related launchers.

    Args:
        argv: The words of the command.
        keywords: Further settings by name, as plain values; they replace the same flags among the words.

    Raises:
        FlagError: The words after an error cannot be read.
    """
    errors = Errors()
    expanded = parser.expand(argv, keywords or {}, {*ELSEWHERE, *COUNTERPARTS}, errors)
    rewritten = rewrite(expanded.words, errors)
    named = [flag for flag, _ in group_words(expanded.words) if flag in FOREIGN_FLAGS]
    megatron = [flag for flag in named if FOREIGN_FLAGS[flag].is_megatron]
    command = parser.read_words(rewritten.words, expanded, errors, ELSEWHERE, megatron)
    later = partial(notes, rewritten=rewritten)
    return replace(command, notes=tuple(rewritten.notes), later=later, remarks=remarks)


def parse_or_exit(argv: Sequence[str], starts: bool = True) -> Validated:
    """Parse and validate for a program.

    Wrong flags are printed to stderr, all of them, and the program exits with 2. ``--help`` and ``--version`` print to
    stdout and exit with 0.

    Args:
        argv: The words of the command.
        starts: Whether the run starts now, unchanged, unless the command explains or rehearses it.
    """
    with _exiting_on_wrong_flags():
        command, validated = judge_with_hub(lambda: read_command(argv), partial(judge, starts=starts), starts)
        return with_inputs(command, validated, starts)


def refuse_wrong_flags(argv: Sequence[str]) -> None:
    """Print wrong flags and exit with 2, as ``parse_or_exit`` does, without asking the hub for the model's config."""
    with _exiting_on_wrong_flags():
        judge_without_hub(read_command(argv))


@contextmanager
def _exiting_on_wrong_flags() -> Iterator[None]:
    """Print the errors that this block raises, by the sections of ``--help``, and exit with 2."""
    try:
        yield
    except ValueError as error:
        messages = error.messages if isinstance(error, FlagError) else [str(error)]
        sections = {flag_name(field): section for field, section in section_of().items()}
        groups = {files.FLAG: "configuration files"} | sections | dict.fromkeys(FOREIGN_FLAGS, OTHERS)
        print(report(messages, groups), file=sys.stderr)
        raise SystemExit(2) from None
