"""The answers of an iteration as they are stored: with tokens, advantage and denominator, within a bound of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

from miles.sample import PromptGroup, Sample
from miles.tracking.jsonl import dump_line
from miles.tracking.run_files import SampleRecord
from miles.tracking.sample_file import spread_order
from miles.train_batch import TrainShard


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any:
        """Return the text of the tokens."""


@dataclass(frozen=True)
class _Weighing:
    """What the train batch says of a sample."""

    train_step: int
    advantage: float
    denominator: float
    trajectories: int


class SampleRecorder:
    """Makes the records of one iteration after another, of at most ``max_bytes`` as rows over the whole run.

    After i of n iterations at most i/n of the bytes are used, so that late iterations find room too; an iteration
    leaves its unused bytes to the next. If not everything fits, whole groups are chosen, spread evenly over the
    iteration; if no group fits, answers of the first without their tokens.

    Args:
        tokenizer: Gives the text of each token.
        max_bytes: The bound; 0 stores nothing.
        num_iterations: How many iterations the run has.
        steps_per_iteration: Optimizer steps per iteration.
        advantage_by_sample: Whether phase 1 gives the advantage; otherwise the trainer makes it, and none is stored.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_bytes: int,
        num_iterations: int,
        steps_per_iteration: int,
        advantage_by_sample: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._num_iterations = num_iterations
        self._steps_per_iteration = steps_per_iteration
        self._advantage_by_sample = advantage_by_sample
        self._texts: dict[int, str] = {}
        self._spent: int | None = None

    def record(
        self, iteration: int, groups: Sequence[PromptGroup], shards_by_rank: Sequence[Sequence[TrainShard]]
    ) -> list[SampleRecord]:
        """Return the records of the samples that fit, in the order of groups.

        Args:
            iteration: The iteration, counted from 0.
            groups: Its scored groups.
            shards_by_rank: For each token rank its shards, one per optimizer step.
        """
        if self._max_bytes == 0:
            return []
        if self._spent is None:  # a resumed run: what came before had at most its share
            self._spent = self._max_bytes * iteration // self._num_iterations
        room = self._max_bytes * (iteration + 1) // self._num_iterations - self._spent
        weighings = _weighings(shards_by_rank, iteration * self._steps_per_iteration + 1)
        step = (iteration + 1) * self._steps_per_iteration
        kept: dict[int, list[SampleRecord]] = {}
        for position in spread_order(len(groups)):
            records = self._records(groups[position], weighings)
            if (size := _size(records, step)) > room:
                break
            kept[position] = records
            room -= size
        if not kept and groups:
            kept[0] = list(self._cut_to_fit(groups[0], weighings, step, room))
        chosen = [record for position in sorted(kept) for record in kept[position]]
        self._spent += _size(chosen, step)
        return chosen

    def _records(self, group: PromptGroup, weighings: dict[tuple[int, int], _Weighing]) -> list[SampleRecord]:
        seen: dict[int, int] = {}  # samples of each trajectory so far
        records = []
        for sample in group.samples:
            assert sample.trajectory_id is not None, "scored samples have one"
            place = seen.get(sample.trajectory_id, 0)
            seen[sample.trajectory_id] = place + 1
            records.append(self._record(sample, weighings[sample.trajectory_id, place]))
        return records

    def _record(self, sample: Sample, weighing: _Weighing) -> SampleRecord:
        return SampleRecord(
            prompt=sample.prompt.text,
            response=sample.response,
            reward=sample.reward,
            reward_parts=sample.reward_parts or None,
            label=sample.prompt.label,
            status=sample.status.value,
            group=sample.group_index,
            trajectory=sample.trajectory_id,
            train_step=weighing.train_step,
            advantage=_rounded(weighing.advantage, 7) if self._advantage_by_sample else None,
            denominator=weighing.denominator,
            trajectories=weighing.trajectories,
            tokens=[self._text(token) for token in sample.response_ids],
            mask=run_lengths(sample.trained_mask),
            rollout_log_probs=[_rounded(value, 4) for value in sample.rollout_log_probs],
            weight_versions=run_lengths(sample.weight_versions) or None,
        )

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = str(self._tokenizer.decode([token], skip_special_tokens=False))
        return self._texts[token]

    def _cut_to_fit(
        self, group: PromptGroup, weighings: dict[tuple[int, int], _Weighing], step: int, room: int
    ) -> Iterator[SampleRecord]:
        for record in self._records(group, weighings):
            short = replace(record, tokens=None, rollout_log_probs=None, weight_versions=None)
            room -= _size([short], step)
            if room < 0:
                return
            yield short


def run_lengths(values: Sequence[int]) -> list[list[int]]:
    """Return ``[[value, count], ...]``.

    >>> run_lengths([1, 1, 0])
    [[1, 2], [0, 1]]
    """
    return [[value, len(list(same))] for value, same in groupby(values)]


def _weighings(shards_by_rank: Sequence[Sequence[TrainShard]], first_step: int) -> dict[tuple[int, int], _Weighing]:
    """Return what the batches say by (trajectory, place of the sample in it). Ranks may share samples."""
    places: dict[int, dict[int, _Weighing]] = {}
    for shards in shards_by_rank:
        for number, shard in enumerate(shards):
            batch = shard.batch
            columns = zip(batch.trajectory_ids, batch.position_in_step, batch.rewards, batch.sample_denoms, strict=True)
            for trajectory, position, advantage, denominator in columns:
                weighing = _Weighing(first_step + number, advantage, denominator, batch.num_trajectories)
                places.setdefault(trajectory, {})[position] = weighing
    return {
        (trajectory, place): found[position]
        for trajectory, found in places.items()
        for place, position in enumerate(sorted(found))
    }


def _size(records: Sequence[SampleRecord], step: int) -> int:
    return sum(len(dump_line(record.row(step)).encode("utf-8", "backslashreplace")) for record in records)


def _rounded(value: float, digits: int) -> float | None:
    return round(float(value), digits) if math.isfinite(value) else None
