"""What the rollout process and a generation worker say to each other. Both sides say it in order, in batches.

To the worker: ``Produce``, ``Cancel``, ``Show``, ``Hold``, ``Ask``, ``Checked``. From it: ``Produced``, ``Failed``,
``Answered``, ``CheckServers``.
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from miles.base.one_line import few_lines, name_and_words, one_line
from miles.rollout.groups import GroupSpec
from miles.rollout.workers.packed import PackedGroup
from miles.types.sample import PromptGroup


@dataclass(frozen=True)
class Kind:
    """The parts of a worker that take part in producing a group.

    Attributes:
        filters: Its filter decides whether the group is kept.
        shows: The rollout process wants to see the scored group (``GroupSpec.scored``).
        taught: Its teacher scores the samples.
        interruptible: Responses survive an abort.
    """

    filters: bool
    shows: bool
    taught: bool
    interruptible: bool


@dataclass(frozen=True)
class Produce:
    """Produce the groups of the drawn prompts, each under its ticket, by ``spec``.

    Attributes:
        spec: How, without functions of the run.
        kind: Which of the worker's own parts take part.
        drawn: The groups without samples.
    """

    spec: GroupSpec
    kind: Kind
    drawn: tuple[tuple[int, PromptGroup], ...]


@dataclass(frozen=True)
class Cancel:
    """Stop producing these."""

    tickets: tuple[int, ...]


@dataclass(frozen=True)
class Show:
    """Know the engine's servers as they are now."""

    servers: Any


@dataclass(frozen=True)
class Hold:
    """Begin no request (``InterruptibleEngine``), or with ``on`` False continue."""

    on: bool


class Question(Enum):
    """What a worker is asked."""

    ABORTED = auto()  # send nothing of what was asked for before; answer when all that was sent has ended
    IN_FLIGHT = auto()  # how many requests are in flight
    RECORD = auto()  # begin to record (--profile)
    RECORDED = auto()  # what was recorded, a ProcessTrace; None if nothing was


@dataclass(frozen=True)
class Ask:
    """Answer a question."""

    number: int
    question: Question


@dataclass(frozen=True)
class Checked:
    """The servers were checked as ``CheckServers`` wanted it, or that failed."""

    number: int
    error: bytes | None


@dataclass(frozen=True)
class Produced:
    """A group is produced.

    Attributes:
        ticket: Its order.
        made: A ``Made``, pickled by itself: what somebody's function has put into a group may refuse.
    """

    ticket: int
    made: bytes


@dataclass(frozen=True)
class Made:
    """What a worker has made of a drawn group.

    Attributes:
        packed: The group.
        shown: Whether the rollout process should show it to its ``GroupSpec.scored``.
        metadata: The metadata of its prompt if the worker has changed them.
    """

    packed: PackedGroup
    shown: bool
    metadata: dict[str, Any] | None


@dataclass(frozen=True)
class Failed:
    """A group could not be produced."""

    ticket: int
    error: bytes


@dataclass(frozen=True)
class Answered:
    """The answer to a question."""

    number: int
    value: Any


@dataclass(frozen=True)
class CheckServers:
    """A request has failed: check the servers, and say when that is done."""

    number: int


def encode(content: Any, what: str = "") -> bytes:
    """Return ``content`` as it is sent.

    Raises:
        ValueError: It holds something that cannot be sent. The message begins with ``what``.
    """
    try:
        return pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever the class of somebody else's object does
        raise ValueError(
            f"--num-rollout-workers: {what} holds something that cannot be sent from one process to another "
            f"({type(error).__name__}: {error}); keep plain data there, or drop --num-rollout-workers"
        ) from error


def decode(sent: bytes) -> Any:
    """Return what was sent.

    Raises:
        ValueError: It holds something that this process cannot make, such as an object of a class that is not here.
    """
    try:
        return pickle.loads(sent)
    except Exception as error:  # whatever the class of somebody else's object does
        raise ValueError(
            "--num-rollout-workers: what another process has sent cannot be read "
            f"({type(error).__name__}: {error}); keep plain data in groups, or drop --num-rollout-workers"
        ) from error


def encode_error(error: Exception, where: str) -> bytes:
    """Return an exception to be raised elsewhere, with the traceback as a note that names ``where``.

    One that cannot be sent becomes a ``RuntimeError`` that names its type.
    """
    note = f"in {where}:\n{few_lines(''.join(traceback.format_exception(error)))}"
    try:
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and str(copy) == str(error)
    except Exception:  # whatever the class of somebody else's error does
        copy = RuntimeError(one_line(name_and_words(error), 1000))
    copy.__notes__ = [note]
    return pickle.dumps(copy)


def decode_error(sent: bytes) -> Exception:
    """Return the exception."""
    error: Exception = pickle.loads(sent)
    return error
