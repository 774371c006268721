"""Describe a command's flags to the user: those without effect, defaults that may surprise, and errors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles.base.flags import changed, flag_name
from miles.base.secrets import public_words
from miles.base.text import program
from miles.config.components import ENGINES
from miles.config.megatron.fields import DESTINATION
from miles.config.settings import Settings

# Headings of the groups, in the order of their display.
NO_EFFECT = "no effect"
SAME = "already so"
SPEED = "speed only"
MEMORY = "memory only"
REPORTING = "reporting only"
FILES = "files only"
OTHER_PART = "belongs to another backend or engine"
READ_AS = "read as"

HEADINGS = {
    NO_EFFECT: "no effect in this run",
    SAME: "the run does this anyway",
    SPEED: "speed only: results are the same",
    MEMORY: "memory only: results are the same, and more memory may be needed",
    REPORTING: "reporting only",
    FILES: "files only: saved files do not change the run",
    OTHER_PART: "settings of a backend or an engine that this run does not use",
    READ_AS: "read as",
}

# Headings of errors whose flags belong to none of our sections.
UNKNOWN = "no such flag"
OTHERS = "flags of other launchers"


def start_refused(fault: str) -> str:
    """Return what a command that does not start here states of a fault that a start would be refused for."""
    return f"a start on this host would be refused: {fault}"


@dataclass(frozen=True)
class Note:
    """Describe one flag that was accepted and has no separate effect.

    Attributes:
        heading: One of ``HEADINGS``.
        written: The flag, with its value.
        why: Why it changes nothing; under ``READ_AS``, the setting that it was read as.
    """

    heading: str
    written: str
    why: str

    @property
    def is_refused_if_strict(self) -> bool:
        """Whether ``--strict-flags`` refuses it. A value that was only read differently has its effect."""
        return self.heading != READ_AS

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


def overruled(section: Any, names: Collection[str], set_fields: Collection[str], by: str) -> list[Note]:
    """Return a note on each of the named fields that the command gives, or that is set: ``by`` takes precedence."""
    values = {name: getattr(section, name) for name in names if name in set_fields or name in changed(section, names)}
    return [note_on(NO_EFFECT, name, value, f"{by} takes precedence") for name, value in values.items()]


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


def report(messages: Sequence[str], groups: Mapping[str, str]) -> str:
    """Return the text that reports errors.

    Args:
        messages: The errors; each begins with its flag.
        groups: The group of each flag; the groups are shown in this order.
    """
    if len(messages) == 1:
        return f"{program()}: error: {messages[0]}"
    lines = [f"{program()}: {len(messages)} errors in the flags:"]
    by_group = dict[str, list[str]]()
    for message in messages:
        by_group.setdefault(_group(message, groups), []).append(message)
    order = [*dict.fromkeys(groups.values()), *by_group]
    for group in sorted(by_group, key=order.index):
        lines += [f"  {group}:", *(f"    {message}" for message in by_group[group])]
    return "\n".join(lines)


def _group(message: str, groups: Mapping[str, str]) -> str:
    flag = re.match(r"--[\w-]+", message)
    if flag is None or ": no such flag;" in message:
        return UNKNOWN
    name = flag[0]
    if name in groups:
        return groups[name]
    return next((engine for engine, row in ENGINES.items() if name.startswith(row.prefixes)), "megatron")


def surprises(settings: Settings, set_fields: Collection[str], on_cpu: bool, has_bf16: bool) -> Iterator[str]:
    """Yield notes on a valid run.

    Args:
        settings: The settings.
        set_fields: The fields that the command sets; fields of Megatron's configuration under ``DESTINATION`` + name.
        on_cpu: Whether the run is on CPU.
        has_bf16: Whether the CPU has bf16 arithmetic.
    """
    if settings.training.bf16 and on_cpu and not has_bf16:
        yield "--bf16: this CPU emulates bf16 arithmetic, which takes many times as long as --fp32, the default here"
    if settings.megatron.optimizer_cpu_offload and on_cpu:
        yield "--optimizer-cpu-offload: on CPU the optimizer's state is in host memory anyway"
    bias, rate = DESTINATION + "moe_router_enable_expert_bias", DESTINATION + "moe_router_bias_update_rate"
    if bias in set_fields and rate not in set_fields:
        yield (
            "--moe-router-enable-expert-bias: biases of experts stay those of the checkpoint; Megatron updates them at "
            "--moe-router-bias-update-rate 0.001 if it is not given"
        )
