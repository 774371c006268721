"""The user's choice among finished groups that wait for an iteration: ``--buffer-filter-path``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from miles.base.user_code.loading import load_function
from miles.types.sample import PromptGroup

_FLAG = "--buffer-filter-path"
MOST_DROPPED = 1000  # groups in a row, without one that is picked: the function keeps nothing


class Picked(NamedTuple):
    """What becomes of the groups that waited."""

    picked: list[PromptGroup]
    waiting: list[PromptGroup]
    dropped: list[PromptGroup]


class BufferFilter:
    """Calls ``def pick(args, rollout_id, buffer, num_samples) -> list[list[Sample]]``, as related launchers do.

    ``buffer`` has the samples of each finished group, by ``group_index``. The function returns up to ``num_samples`` of
    its entries, which the iteration trains on. Groups that it takes out of ``buffer`` without returning them are
    dropped; the others wait.
    """

    def __init__(self, path: str, args: Any) -> None:
        """Import the function. ``args`` are all flags by their names.

        Raises:
            ValueError: The path cannot be imported.
        """
        self._path = path
        self._args = args
        self._function: Callable[..., Any] = load_function(path, _FLAG)
        self._dropped_in_a_row = 0

    def pick(self, iteration: int, groups: Sequence[PromptGroup], wanted: int) -> Picked:
        """Return which of ``groups`` are picked, wait and are dropped, each in the order of ``groups``.

        Raises:
            ValueError: The function returned something else than entries of the buffer, or too many, or it has picked
                nothing of ``MOST_DROPPED`` groups.
        """
        group_of = {id(group.samples): group for group in groups}
        buffer = [group.samples for group in groups]
        answer = self._function(self._args, iteration, buffer, wanted)
        at = f"{_FLAG} {self._path}: iteration {iteration}"
        ids = [id(samples) for samples in answer] if isinstance(answer, list) else None
        if ids is None or len({*ids} & group_of.keys()) != len(ids):
            raise ValueError(f"{at}: returned {answer!r:.80}; return a list of entries of buffer, each once")
        if len(ids) > wanted:
            raise ValueError(f"{at}: returned {len(ids)} groups; return at most num_samples, {wanted}")
        kept = {id(samples) for samples in buffer} - {*ids}
        if not kept <= group_of.keys():
            raise ValueError(f"{at}: put other groups into buffer; take groups out of it, or leave them there")
        found = Picked(
            [group for group in groups if id(group.samples) in ids],
            [group for group in groups if id(group.samples) in kept],
            [group for group in groups if id(group.samples) not in kept and id(group.samples) not in ids],
        )
        self._dropped_in_a_row = 0 if found.picked else self._dropped_in_a_row + len(found.dropped)
        if self._dropped_in_a_row >= MOST_DROPPED:
            raise ValueError(
                f"{at}: it has dropped {self._dropped_in_a_row} groups in a row and picked none; return some of them, "
                "or leave them in buffer"
            )
        return found

    def stuck(self, iteration: int, waiting: int, missing: int) -> ValueError:
        """Return the error of a run in which no further group may be generated, and too few are picked."""
        rule = f"iteration {iteration} misses {missing} groups, and {waiting} wait and are not picked"
        return ValueError(
            f"{_FLAG} {self._path}: {rule}, and no more may be generated while they wait; pick more, take those out of "
            "buffer that are never picked, or raise --over-sampling-batch-size (with --fully-async: --async-steps)"
        )
