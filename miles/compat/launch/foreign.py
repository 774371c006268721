"""Describe flags of related launchers that are no setting here: each is accepted with a note, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from miles.base.flags import Errors
from miles.config.notes import NO_EFFECT, SAME, Note, written
from miles.config.settings import Settings

Kind = Literal["switch", "value", "list", "optional"]


@dataclass(frozen=True)
class Foreign:
    """Describe one flag.

    Attributes:
        flag: The flag.
        kind: The words that it takes: none, one, several, or one at most.
        why: Why it changes nothing here or, if it is refused, why it cannot be obeyed.
        heading: The heading of its note; None if it is refused.
        what_to_do: What to do instead, if it is refused.
        neutral: The values at which a refused flag asks for nothing.
        accepted_if: Says in which runs a refused flag changes nothing.
        accepted_why: Why not.
        is_megatron: Whether the flag is one of Megatron, and so chooses that backend.
    """

    flag: str
    kind: Kind
    why: str
    heading: str | None = None
    what_to_do: str = ""
    neutral: tuple[str, ...] = ()
    accepted_if: Callable[[Settings, Mapping[str, Any]], bool] | None = None
    accepted_why: str = ""
    is_megatron: bool = False

    @property
    def verdict(self) -> str:
        """What happens to the flag, in the words of the page of launch scripts."""
        if self.heading is not None:
            return "noted"
        return "noted or refused" if self.neutral or self.accepted_if is not None else "refused"

    def judge(self, value: Any, settings: Settings, given: Mapping[str, Any], errors: Errors) -> Note | None:
        """Return the note on the flag, or add its error.

        Args:
            value: Its value; True for a switch.
            settings: The settings of the run.
            given: All flags of this kind in the command, with their values.
            errors: Collects the refusal.
        """
        shown = written(self.flag, value)
        if self.heading is not None:
            return Note(self.heading, shown, self.why)
        if self.neutral and _text(value) in self.neutral:
            return Note(SAME, shown, "the value that asks for nothing")
        if self.accepted_if is not None and self.accepted_if(settings, given):
            return Note(NO_EFFECT, shown, self.accepted_why)
        errors.add(f"{shown}: {self.why}; {self.what_to_do}")
        return None


def _text(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


def noted(heading: str, why: str, *flags: str, is_megatron: bool = False) -> list[Foreign]:
    """Return flags that are accepted for one reason. ``--flag V`` takes a value, ``--flag V...`` several."""
    return [Foreign(*_spelled(flag), why, heading, is_megatron=is_megatron) for flag in flags]


def refused(why: str, what_to_do: str, *flags: str, **details: Any) -> list[Foreign]:
    """Return flags that are refused for one reason, spelled as in ``noted``."""
    return [Foreign(*_spelled(flag), why, what_to_do=what_to_do, **details) for flag in flags]


def _spelled(text: str) -> tuple[str, Kind]:
    flag, _, value = text.partition(" ")
    kinds: dict[str, Kind] = {"": "switch", "V": "value", "V...": "list", "V?": "optional"}
    return flag, kinds[value]


def by_flag(rows: Iterable[Foreign]) -> dict[str, Foreign]:
    """Return the flags by their names, each once."""
    found = dict[str, Foreign]()
    for row in rows:
        assert row.flag not in found, f"{row.flag} has two verdicts"
        found[row.flag] = row
    return found
