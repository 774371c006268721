"""A command line that is being rewritten: its words, and what was read as what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from miles.base.flags import Errors
from miles.config.notes import READ_AS, Note, written
from miles.config.spelling import group_words, without_flags


@dataclass
class Line:
    """Hold the words of a command between the readers of foreign spellings. Each reader may change them.

    Attributes:
        words: The words; each flag is a word, with its value after it or after ``=``.
        errors: Collects what cannot be obeyed.
        foreign: The flags of ``FOREIGN_FLAGS`` in it that are left to judge, with their values; True for a switch.
        notes: What was read in another spelling.
    """

    words: list[str]
    errors: Errors
    foreign: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def __contains__(self, flag: str) -> bool:
        return any(flag == name for name, _ in group_words(self.words))

    def value(self, flag: str) -> str | None:
        """Return the value of a flag; None if it is not there, or has not exactly one. The last one counts."""
        values = dict(group_words(self.words)).get(flag, ())
        return values[0] if len(values) == 1 else None

    def drop(self, *flags: str) -> None:
        """Remove flags with their values."""
        self.words = without_flags(self.words, flags)

    def read_as(self, flag: str, why: str, *words: str) -> None:
        """Replace a flag by ``words``, and note its reading."""
        self.note(READ_AS, flag, why)
        self.drop(flag)
        self.words += words

    def note(self, heading: str, flag: str, why: str) -> None:
        """Add the note on a flag as written."""
        self.notes.append(Note(heading, written(flag, dict(group_words(self.words))[flag]), why))
