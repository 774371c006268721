"""Scored groups on their way from a generation worker to the rollout process: columns of numbers as arrays.

A pickled list costs time per number on both sides. The prompt is not sent back, as the rollout process has it.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from miles.rollout.groups import ProducedGroup
from miles.types.sample import Prompt, PromptGroup, Sample

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
    """Return ``produced``, a group of ``prompt``, as it is sent."""
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
    if type(sample) is not Sample or sample.prompt is not prompt:  # made by a function of the user's: sent as it is
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
    """Return a list of numbers as ``_Repeated`` if they are equal, else as an array; anything else as it is."""
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
