"""One iteration as a timeline: when generation and training run, and which waits for the other.

Without ``--async-steps`` the two take turns. With it, generation runs alongside training, and both wait for the slower
one before the engines get new weights (rollout/ordering.py); the timeline shows an iteration in the middle of a run.
Starts and lengths are drawn at the middle of each range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from miles.commands.rehearsal.meter import Phase
from miles.commands.rehearsal.rehearsal import Rehearsal
from miles.commands.rehearsal.roofline import NOTHING, Seconds

WAITS = "waits"


class Side(StrEnum):
    """Who is busy."""

    ROLLOUT = "rollout"
    TRAINER = "trainer"
    BOTH = "both"


class Span(NamedTuple):
    """A piece of a lane, in seconds."""

    start: float
    length: float


@dataclass(frozen=True)
class Lane:
    """A phase of an iteration, or the wait of a side.

    Attributes:
        side: Who is busy, or waits.
        name: The phase, or ``WAITS``.
        seconds: Of all spans together.
        spans: At the middle of the range; one for each optimizer step, else one.
    """

    side: Side
    name: str
    seconds: Seconds
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Timeline:
    """An iteration: its lanes, by side, and how long it takes."""

    lanes: tuple[Lane, ...]
    seconds: Seconds
    overlaps: bool  # generation and training run at the same time


def timeline_of(rehearsal: Rehearsal) -> Timeline | None:
    """Return the timeline of an iteration; None if the engines have no room to generate."""
    settings = rehearsal.settings
    generates = rehearsal.generation.engines > 0 and not settings.is_given_samples
    generation = rehearsal.generation.duration if generates else NOTHING
    if not math.isfinite(generation.high):
        return None
    training, sync = rehearsal.training, rehearsal.sync or NOTHING
    overlaps = generates and settings.rollout.async_steps > 0
    begin = 0.0 if overlaps else _middle(generation)  # of training
    trainer = _trainer_lanes(rehearsal, begin)
    meet = max(_middle(generation), begin + _middle(training))  # then the engines get weights
    rollout: list[Lane] = []
    if generates:
        rollout.append(_lane(Side.ROLLOUT, Phase.GENERATE, generation, 0.0))
        if overlaps:
            waits = _beyond(training, generation), _beyond(generation, training)
            trainer += _waits(Side.TRAINER, waits[1], begin + _middle(training), meet)
        else:
            waits = training, generation
            trainer = _waits(Side.TRAINER, waits[1], 0.0, begin) + trainer
        rollout += _waits(Side.ROLLOUT, waits[0], _middle(generation), meet)
    updates = [_lane(Side.BOTH, Phase.SYNC, sync, meet)] if sync != NOTHING else []
    busy = Seconds(max(generation.low, training.low), max(generation.high, training.high))
    seconds = (busy if overlaps else generation + training) + sync
    return Timeline((*rollout, *trainer, *updates), seconds, overlaps)


def _trainer_lanes(rehearsal: Rehearsal, begin: float) -> list[Lane]:
    """Return the lanes of the trainer's phases: everything is scored before the first step."""
    settings = rehearsal.settings
    scoring = rehearsal.scoring
    lanes = [_lane(Side.TRAINER, Phase.SCORE, scoring, begin)] if scoring != NOTHING else []
    steps, start = settings.steps_per_iteration, begin + _middle(scoring)
    of_step = _middle(rehearsal.step)
    for phase in (Phase.TRAIN, Phase.REDUCE, Phase.OPTIMIZE):
        each = rehearsal.phase_seconds(phase)
        if each != NOTHING:
            spans = tuple(Span(start + step * of_step, _middle(each)) for step in range(steps))
            lanes.append(Lane(Side.TRAINER, phase, each * steps, spans))
        start += _middle(each)
    return lanes


def _lane(side: Side, name: str, seconds: Seconds, start: float) -> Lane:
    return Lane(side, name, seconds, (Span(start, _middle(seconds)),))


def _waits(side: Side, seconds: Seconds, start: float, end: float) -> list[Lane]:
    """Return the lane of a side that waits from ``start`` to ``end``; none if it never waits."""
    if not seconds.high:
        return []
    return [Lane(side, WAITS, seconds, (Span(start, end - start),))]


def _beyond(longer: Seconds, other: Seconds) -> Seconds:
    """Return by how much ``longer`` may exceed ``other``."""
    return Seconds(max(0.0, longer.low - other.high), max(0.0, longer.high - other.low))


def _middle(seconds: Seconds) -> float:
    return (seconds.low + seconds.high) / 2
