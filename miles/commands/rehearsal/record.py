"""What a rank's operations did, in order: allocations, work and collectives, and copies of a part of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias


class Kind(StrEnum):
    """What memory holds."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"  # and whatever else the operations of a pass allocate
    LOGITS = "logits"
    COMMUNICATION = "communication"  # gathered weights, and the buffers of collectives
    KV_CACHE = "KV cache"
    ENGINE = "engine"  # its weights and workspace
    RUNTIME = "runtime"  # CUDA context, libraries, fragmentation


class Phase(StrEnum):
    """A part of an iteration, in order."""

    BUILD = "build"
    GENERATE = "generate"
    SCORE = "score"
    TRAIN = "forward and backward"
    REDUCE = "reduce gradients"
    OPTIMIZE = "optimizer"
    SYNC = "weight sync"


class Work(NamedTuple):
    """The size of one operation."""

    flops: int
    bytes: int  # read and written
    itemsize: int  # bytes of a number in its first floating-point operand


class Message(NamedTuple):
    """One collective, as one rank sees it."""

    name: str
    bytes: int  # of the largest tensor in it: the whole that is gathered, reduced or exchanged
    ranks: tuple[int, ...]


@dataclass
class Tally:
    """How often each operation and each collective of a phase runs."""

    work: Counter[Work] = field(default_factory=Counter)
    messages: Counter[Message] = field(default_factory=Counter)

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return sum(work.flops * count for work, count in self.work.items())

    @property
    def bytes(self) -> int:
        """Bytes that operations read and write."""
        return sum(work.bytes * count for work, count in self.work.items())

    def add(self, other: Tally) -> None:
        """Count the work of ``other`` too."""
        self.work.update(other.work)
        self.messages.update(other.messages)

    def beyond(self, earlier: Tally) -> Tally:
        """Return what was counted since the tally was ``earlier``."""
        return Tally(self.work - earlier.work, self.messages - earlier.messages)

    def scaled(self, factor: float) -> Tally:
        """Return the tally of ``factor`` times the work."""
        return Tally(
            Counter({work: count * factor for work, count in self.work.items()}),
            Counter({message: count * factor for message, count in self.messages.items()}),
        )


Usage: TypeAlias = dict[Kind, int]  # bytes by kind


class _Event(NamedTuple):
    storage: int
    change: int
    phase: Phase


class Moment(NamedTuple):
    """A position in the record, with what was counted before it."""

    position: int
    tallies: dict[Phase, Tally]


class Stretch(NamedTuple):
    """The part of the record between two moments."""

    start: int
    end: int
    tallies: dict[Phase, Tally]  # of this part alone


class _Copies(NamedTuple):
    """A part of the record that happens so many more times at its end, or what copies release there."""

    start: int
    end: int
    times: int
    released: Mapping[Kind, int]


class Record:
    """The changes of memory and the work of one rank.

    Attributes:
        tallies: Operations and collectives by phase.
        kinds: What storages hold, by their numbers; activations if a number is not there.
    """

    def __init__(self) -> None:
        self.tallies: dict[Phase, Tally] = {}
        self.kinds: dict[int, Kind] = {}
        self._events: list[_Event] = []
        self._copies: list[_Copies] = []

    def add(self, storage: int, change: int, phase: Phase) -> None:
        """Note that the storage of this number has grown by ``change`` bytes."""
        self._events.append(_Event(storage, change, phase))

    def tally(self, phase: Phase) -> Tally:
        """Return the tally of a phase, to count in it."""
        return self.tallies.setdefault(phase, Tally())

    def forget(self, phases: Iterable[Phase]) -> None:
        """Drop the work of ``phases`` that was done so far; allocated memory stays."""
        for phase in phases:
            self.tallies.pop(phase, None)

    def mark(self) -> int:
        """Return the current position, for ``peaks`` and ``held``."""
        return len(self._events)

    def moment(self) -> Moment:
        """Return the current moment, for ``since``."""
        return Moment(len(self._events), {phase: tally.scaled(1) for phase, tally in self.tallies.items()})

    def since(self, moment: Moment) -> Stretch:
        """Return what was recorded since ``moment``."""
        found = {p: tally.beyond(moment.tallies.get(p, Tally())) for p, tally in self.tallies.items()}
        tallies = {phase: tally for phase, tally in found.items() if tally.work or tally.messages}
        return Stretch(moment.position, len(self._events), tallies)

    def is_equal(self, one: Stretch, other: Stretch) -> bool:
        """Return whether memory changed alike in both stretches, and they have the same work."""
        changes = [
            [(event.change, event.phase) for event in self._events[stretch.start : stretch.end]]
            for stretch in (one, other)
        ]
        return one.tallies == other.tallies and changes[0] == changes[1]

    def copy(self, stretch: Stretch, times: int) -> None:
        """Let ``stretch``, which ends now, happen ``times`` more times."""
        assert stretch.end == len(self._events)
        self._copies.append(_Copies(stretch.start, stretch.end, times, {}))
        for phase, tally in stretch.tallies.items():
            self.tally(phase).add(tally.scaled(times))

    def release_copies(self) -> Usage:
        """Let copies release what their originals have released by now outside of a stretch, and return it."""
        net: Counter[int] = Counter()
        first: dict[int, int] = {}
        for position, event in enumerate(self._events):
            net[event.storage] += event.change
            first.setdefault(event.storage, position)
        released = self._held_by(self._copies)
        for start, end, times, _ in self._copies:
            for event in {event.storage: event for event in self._events[start:end]}.values():
                if start <= first[event.storage]:
                    released[self._kind(event)] -= times * net[event.storage]
        usage = {kind: size for kind, size in released.items() if size}
        self._copies.append(_Copies(len(self._events), len(self._events), 0, usage))
        return usage

    def peaks(self, since: int = 0) -> dict[Phase, Usage]:
        """Return what memory held when each phase was at its peak, counting from ``since`` on."""
        held: Counter[Kind] = Counter()
        total = position = 0
        best: dict[Phase, int] = {}
        found: dict[Phase, Usage] = {}

        def walk(start: int, end: int) -> None:
            nonlocal total
            for number, event in enumerate(self._events[start:end], start):
                held[self._kind(event)] += event.change
                total += event.change
                if number >= since and total > best.get(event.phase, -1):
                    best[event.phase] = total
                    found[event.phase] = {kind: size for kind, size in held.items() if size}

        def add(change: Mapping[Kind, int], times: int) -> None:
            nonlocal total
            for kind, size in change.items():
                held[kind] += times * size
                total += times * size

        for start, end, times, released in self._copies:
            walk(position, end)
            position = end
            add(released, -1)
            change = self._change(start, end)
            if sum(change.values()) > 0:  # the last copy holds most
                add(change, times - 1)
                walk(start, end)
            else:  # no copy holds more than the original
                add(change, times)
        walk(position, len(self._events))
        return found

    def held(self, until: int) -> Usage:
        """Return what memory held at position ``until``."""
        found = self._change(0, until)
        found.update(self._held_by([copies for copies in self._copies if copies.end <= until]))
        return {kind: size for kind, size in found.items() if size}

    def _held_by(self, copies: Sequence[_Copies]) -> Counter[Kind]:
        """Return what ``copies`` have allocated and not released."""
        held: Counter[Kind] = Counter()
        for start, end, times, released in copies:
            for kind, size in self._change(start, end).items():
                held[kind] += times * size
            held.subtract(released)
        return held

    def _change(self, start: int, end: int) -> Counter[Kind]:
        found: Counter[Kind] = Counter()
        for event in self._events[start:end]:
            found[self._kind(event)] += event.change
        return found

    def _kind(self, event: _Event) -> Kind:
        return self.kinds.get(event.storage, Kind.ACTIVATIONS)
