"""The messages between the rollout process and a generation worker. Both send them in order, in batches.

To the worker: ``Produce``, ``Cancel``, ``Show``, ``Hold``, ``Ask``, ``Checked``. From it: ``Produced``, ``Failed``,
``Answered``, ``CheckServers``.
"""

import pickle
import traceback
from array import array
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from miles.base.text import few_lines, name_and_words, one_line
from miles.rollout.groups import GroupSpec, ProducedGroup
from miles.types.sample import Prompt, PromptGroup, Sample

# Scored groups on their way from a generation worker to the rollout process: columns of numbers as arrays.
#
# A pickled list costs time per number in both processes. The prompt is not sent back, as the rollout process has it.


# Columns of a sample, by the type code of their arrays.
_COLUMNS = {
    "response_ids": "q",
    "loss_mask": "q",
    "weight_versions": "q",
    "rollout_log_probs": "d",
    "teacher_log_probs": "d",
}
_PROMPT = "prompt"
_SAMPLES = "samples"


class _Repeated(NamedTuple):
    """A list of equal numbers."""

    number: int
    times: int


PackedGroup = tuple[dict[str, Any], list[Any], int, str | None]


def pack(produced: ProducedGroup, prompt: Prompt) -> PackedGroup:
    """Return ``produced``, a group of ``prompt``, as sent."""
    group = {name: value for name, value in vars(produced.group).items() if name not in (_PROMPT, _SAMPLES)}
    samples = [_pack_sample(sample, prompt) for sample in produced.group.samples]
    return group, samples, produced.reward_errors, produced.drop_reason


def unpack(packed: PackedGroup, prompt: Prompt) -> ProducedGroup:
    """Return what ``pack`` was given, with this process's own ``prompt``."""
    attributes, samples, reward_errors, drop_reason = packed
    group = PromptGroup(attributes["group_index"], prompt)
    vars(group).update(attributes)
    group.samples = [_unpack_sample(sample, prompt) for sample in samples]
    return ProducedGroup(group, reward_errors, drop_reason)


def _pack_sample(sample: Sample, prompt: Prompt) -> Any:
    if type(sample) is not Sample or sample.prompt is not prompt:  # made by a function of the user's: sent unchanged
        return sample
    attributes = vars(sample).copy()  # those that a user's function has added too
    del attributes[_PROMPT]
    for name, code in _COLUMNS.items():
        attributes[name] = _pack_column(attributes[name], code)
    return attributes


def _unpack_sample(packed: Any, prompt: Prompt) -> Sample:
    if isinstance(packed, Sample):
        return packed
    for name in _COLUMNS:
        packed[name] = _unpack_column(packed[name])
    sample = object.__new__(Sample)
    vars(sample).update(packed, prompt=prompt)
    return sample


def _pack_column(column: Any, code: str) -> Any:
    """Return a list of numbers as ``_Repeated`` if they are equal, else as an array; anything else unchanged."""
    if type(column) is not list or not column:
        return column
    first = column[0]
    try:
        if type(first) is int and column.count(first) == len(column):
            return _Repeated(first, len(column))
        return array(code, column)
    except (TypeError, OverflowError):  # not all of them are such numbers
        return column


def _unpack_column(packed: Any) -> Any:
    if isinstance(packed, array):
        return packed.tolist()
    return [packed.number] * packed.times if isinstance(packed, _Repeated) else packed


@dataclass(frozen=True)
class Produce:
    """Produce the groups of the drawn prompts, each under its ticket, by ``spec``.

    Attributes:
        spec: How, without its filter: the worker has one too.
        drawn: The groups without samples.
    """

    spec: GroupSpec
    drawn: tuple[tuple[int, PromptGroup], ...]


@dataclass(frozen=True)
class Cancel:
    """Stop producing these."""

    tickets: tuple[int, ...]


@dataclass(frozen=True)
class Show:
    """Know the engine's servers at present."""

    servers: Any


@dataclass(frozen=True)
class Hold:
    """Begin no request (``InterruptibleEngine``), or with ``on`` False continue."""

    on: bool


class Question(Enum):
    """The question to a worker."""

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
        result: A ``GroupResult``, pickled on its own: what somebody's function has put into a group may refuse.
    """

    ticket: int
    result: bytes


@dataclass(frozen=True)
class GroupResult:
    """The result of a worker for a drawn group.

    Attributes:
        packed: The group.
        metadata: The metadata of its prompt if the worker has changed them.
    """

    packed: PackedGroup
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
    """Return ``content`` as sent.

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
