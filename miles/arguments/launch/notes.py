"""Say which flags were accepted and change nothing in this run, grouped by the reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from miles.flags import flag_name
from miles.secret_values import public_words

# Headings of the groups, in the order in which they are shown.
NO_EFFECT = "no effect"
SAME = "already so"
SPEED = "speed only"
MEMORY = "memory only"
REPORTING = "reporting only"
FILES = "files only"
OTHER_PART = "belongs to another backend or engine"
READ_AS = "read as"

HEADINGS = {
    NO_EFFECT: "no effect, here and in the launchers that these flags come from",
    SAME: "the run does this anyway",
    SPEED: "speed only: results are the same",
    MEMORY: "memory only: results are the same, and more memory may be needed",
    REPORTING: "reporting only",
    FILES: "files only: saved files do not change the run",
    OTHER_PART: "settings of a backend or an engine that this run does not use",
    READ_AS: "read as",
}
_CHANGES_NOTHING = {*HEADINGS} - {READ_AS}


@dataclass(frozen=True)
class Note:
    """Describe one flag that was accepted and has no effect of its own.

    Attributes:
        heading: One of ``HEADINGS``.
        written: The flag, with its value.
        why: Why it changes nothing; under ``READ_AS``, what it was read as.
    """

    heading: str
    written: str
    why: str

    @property
    def is_refused_if_strict(self) -> bool:
        """Whether ``--strict-flags`` refuses it. A value that was only read differently has its effect."""
        return self.heading in _CHANGES_NOTHING

    @property
    def refusal(self) -> str:
        """The error under ``--strict-flags``."""
        flag = self.written.split()[0]
        return f"{self.written}: has no effect ({self.why}); drop {flag}, or drop --strict-flags"


def written(flag: str, value: Any) -> str:
    """Spell a flag with its value, without secrets; a switch has none."""
    if value is None or isinstance(value, bool):
        return flag
    words = value if isinstance(value, list | tuple) else [value]
    return " ".join(public_words([flag, *map(str, words)]))


def note_on(heading: str, field: str, value: Any, why: str) -> Note:
    """Return the note on a field of one of our sections."""
    return Note(heading, written(flag_name(field), value), why)


def grouped(notes: Iterable[Note]) -> list[str]:
    """Return the notes as lines: one per heading, and below it one per reason, with all of its flags."""
    notes = list(notes)
    lines = []
    for heading, title in HEADINGS.items():
        reasons = dict[str, list[str]]()
        for note in notes:
            if note.heading == heading:
                reasons.setdefault(note.why, []).append(note.written)
        if reasons:
            lines.append(f"{title}:")
            lines += [f"  {', '.join(flags)}: {why}" for why, flags in reasons.items()]
    return lines


def strict_errors(notes: Sequence[Note]) -> list[str]:
    """Return the errors that ``--strict-flags`` makes of the notes."""
    return [note.refusal for note in notes if note.is_refused_if_strict]
