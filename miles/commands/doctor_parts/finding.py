"""The findings of ``miles doctor``, one per part of the machine, and how they are written as text or JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import miles
from miles.base.flags import count

WIDTH = 110


class State(StrEnum):
    """How a finding bears on training, in the order of the report."""

    FAULT = "fault"  # training cannot run
    MISSING = "missing"  # something cannot be used
    NOTE = "note"  # training runs, and this may surprise
    OK = "ok"


@dataclass(frozen=True)
class Finding:
    """What was found about one part of the machine.

    Attributes:
        name: The part.
        state: How it bears on training.
        found: What was found, in one line.
        effect: What follows from a state that is not ok.
        remedy: What to do: a command if one is enough.
        facts: The same for programs.
    """

    name: str
    state: State
    found: str
    effect: str = ""
    remedy: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain JSON."""
        return asdict(self) | {"state": self.state.value}


def can_train(findings: Iterable[Finding]) -> bool:
    """Return whether training can run."""
    return all(finding.state != State.FAULT for finding in findings)


def as_text(findings: Sequence[Finding]) -> str:
    """Return one line per finding, below it what follows and what to do, and the verdict at the end."""
    column = max(len(finding.name) for finding in findings)
    lines = [line for finding in findings for line in _lines(finding, column)]
    return "\n".join([*lines, "", verdict(findings)])


def verdict(findings: Iterable[Finding]) -> str:
    """Say in one line whether training can run."""
    findings = list(findings)
    faults = [finding.name for finding in findings if finding.state == State.FAULT]
    if faults:
        return f"training cannot run here: {', '.join(faults)}"
    missing = sum(finding.state == State.MISSING for finding in findings)
    return "training can run here" + (f", without {count(missing, 'optional part')}" if missing else "")


def _lines(finding: Finding, column: int) -> list[str]:
    head = f"{finding.state.value:8} {finding.name:{column}}  "
    indent = " " * len(head)
    lines = textwrap.wrap(finding.found, WIDTH, initial_indent=head, subsequent_indent=indent, break_long_words=False)
    if finding.effect:
        lines += textwrap.wrap(finding.effect, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return lines + ([f"{indent}-> {finding.remedy}"] if finding.remedy else [])  # one line, to be copied


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as a JSON object."""
    rows = [finding.to_json() for finding in findings]
    return json.dumps({"miles": miles.__version__, "can_train": can_train(findings), "findings": rows}, indent=1)
