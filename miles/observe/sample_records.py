"""The answers of an iteration as stored: with tokens, advantage and denominator, within a bound of bytes.

A few of them, or all, also get the trainer's values of their tokens. The rollout process chooses these answers and
leaves room for the values; the trainer's ranks record them (batch/collate.py), and the launcher joins both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from miles.objective.chosen import build_objective
from miles.objective.settings import LossArguments
from miles.objective.token_weights import token_weights_of
from miles.observe.run_files import SampleRecord, dump_line, spread_order
from miles.types.sample import PromptGroup, Sample
from miles.types.train_batch import TokenColumns, TrainShard

if TYPE_CHECKING:
    from miles.types.images import PromptImages

ALL = -1  # of ``--samples-token-values``
VALUE_BYTES = 12  # of a rounded number in a list, at most: "-1.234e-05, "
_LARGEST, _LARGEST_LOG = 9.999e6, 9999.0  # the largest numbers that fit in VALUE_BYTES

Place = tuple[int, int]  # of a sample: the step in the iteration, the position in the step


class TokenDecoder(Protocol):
    """The part of a tokenizer that this module needs."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any:
        """Return the text of the tokens."""


@dataclass(frozen=True)
class _Weighing:
    """The values of a sample in the train batch."""

    train_step: int
    advantage: float
    denominator: float
    trajectories: int
    place: Place


@dataclass(frozen=True)
class StoredSamples:
    """The records of an iteration, and which of them the trainer completes.

    Attributes:
        records: In the order of groups.
        places: The train step and position in it of each chosen record, by its index in ``records``.
        columns: The names of the columns of tokens that room is left for.
    """

    records: list[SampleRecord]
    places: dict[int, Place] = field(default_factory=dict)
    columns: tuple[str, ...] = ()

    def marked(self, shards_by_rank: Sequence[Sequence[TrainShard]]) -> list[list[TrainShard]]:
        """Return the shards with the chosen samples marked, so that the trainer records their tokens."""
        wanted: dict[int, set[int]] = {}
        for step, position in self.places.values():
            wanted.setdefault(step, set()).add(position)
        return [
            [replace(shard, recorded=frozenset(wanted.get(step, ()))) for step, shard in enumerate(shards)]
            for shards in shards_by_rank
        ]

    def completed(self, tokens: Mapping[Place, TokenColumns]) -> list[SampleRecord]:
        """Return the records with the values that the trainer recorded."""
        records = list(self.records)
        for index, place in self.places.items():
            if place in tokens:
                columns: dict[str, Any] = {name: _column(tokens[place], name) for name in self.columns}
                records[index] = replace(records[index], **columns)
        return records


def token_columns_of(loss: LossArguments, steps: int) -> tuple[str, ...]:
    """Return the columns of tokens that a run stores: those that can differ from 1, or from the sample's advantage.

    There are none without a policy loss.

    Args:
        loss: The flags of the objective.
        steps: The optimizer steps of a pass over an iteration. In the only one every ratio is 1.
    """
    if not loss.type.uses_policy_loss:
        return ()
    columns = ["log_probs"]
    if steps > 1:
        columns.append("ratios")
    if token_weights_of(loss):
        columns.append("token_weights")
    if build_objective(loss).estimates_by_token:
        columns.append("advantages")
    return tuple(columns)


@dataclass
class SampleRecorder:
    """Makes the records of one iteration after another, of at most ``max_bytes`` as rows over the whole run.

    After i of n iterations at most i/n of the bytes are used, so that late iterations find room too; an iteration
    leaves its unused bytes to the next. If not everything fits, whole groups are chosen, spread evenly over the
    iteration; if no group fits, answers of the first without their tokens.

    Attributes:
        tokenizer: Gives the text of each token.
        max_bytes: The bound; 0 stores nothing.
        num_iterations: How many iterations the run has.
        steps_per_iteration: Optimizer steps per iteration.
        advantage_by_sample: Whether phase 1 gives the advantage; otherwise the trainer makes it, and none is stored.
        token_values: How many records of an iteration the trainer completes; ``ALL``: all.
        token_columns: The columns of these records; without some, the trainer completes none.
        thumbnails: Makes thumbnails of a prompt's images; the number is the length of the prompt in tokens.
    """

    tokenizer: TokenDecoder
    _: KW_ONLY
    max_bytes: int
    num_iterations: int
    steps_per_iteration: int
    advantage_by_sample: bool
    token_values: int = 0
    token_columns: tuple[str, ...] = ()
    thumbnails: Callable[[PromptImages, int], list[str]] | None = None
    _texts: dict[int, str] = field(default_factory=dict)
    _spent: int | None = None

    def record(
        self, iteration: int, groups: Sequence[PromptGroup], shards_by_rank: Sequence[Sequence[TrainShard]]
    ) -> StoredSamples:
        """Return the records of the samples that fit, in the order of groups.

        Args:
            iteration: The iteration, counted from 0.
            groups: Its scored groups.
            shards_by_rank: For each token rank its shards, one per optimizer step.
        """
        if self.max_bytes == 0:
            return StoredSamples([])
        if self._spent is None:  # a resumed run: what came before had at most its share
            self._spent = self.max_bytes * iteration // self.num_iterations
        room = self.max_bytes * (iteration + 1) // self.num_iterations - self._spent
        weighings = _weighings(shards_by_rank, iteration * self.steps_per_iteration + 1)
        step = (iteration + 1) * self.steps_per_iteration
        group_records: dict[int, list[SampleRecord]] = {}
        group_places: dict[int, dict[int, Place]] = {}  # of the chosen records of a group, by their index in it
        wanted = self.token_values if self.token_columns else 0
        if wanted == ALL:
            wanted = sum(len(group.samples) for group in groups)
        for number, position in enumerate(spread_order(len(groups))):
            known = list(_known(groups[position], weighings))
            records = [self._record(sample, weighing) for sample, weighing in known]
            trained = {i: weighing.place for i, (_, weighing) in enumerate(known) if weighing is not None}
            chosen = _turn(number, wanted, len(groups), len(records))
            places = {i: trained[i] for i in chosen if i in trained}
            size = _size(records, step) + sum(self._reserved(known[i][0]) for i in places)
            if size > room:
                break
            group_records[position] = records
            group_places[position] = places
            room -= size
            self._spent += size
        if not group_records and groups:
            group_records[0] = list(self._cut_to_fit(groups[0], weighings, step, room))
            self._spent += _size(group_records[0], step)
        stored = StoredSamples([], columns=self.token_columns)
        for position in sorted(group_records):
            begin = len(stored.records)
            stored.places.update({begin + i: place for i, place in group_places.get(position, {}).items()})
            stored.records.extend(group_records[position])
        return stored

    def _reserved(self, sample: Sample) -> int:
        """Return the bytes that the trainer's columns of a sample take at most."""
        names = sum(len(f', "{name}": []') for name in self.token_columns)
        return names + VALUE_BYTES * len(self.token_columns) * sample.response_length

    def _record(self, sample: Sample, weighing: _Weighing | None) -> SampleRecord:
        """Return the record of a sample. One that its step leaves out has a mask of 0 and no weight."""
        prompt = sample.prompt
        images = None
        if prompt.images is not None and self.thumbnails is not None:
            images = self.thumbnails(prompt.images, len(prompt.token_ids))
        record = SampleRecord(
            prompt=prompt.text,
            images=images,
            response=sample.response,
            reward=sample.reward,
            reward_parts=sample.reward_parts or None,
            label=prompt.label,
            status=sample.status.value,
            group=sample.group_index,
            trajectory=sample.trajectory_id,
            tokens=[self._text(token) for token in sample.response_ids],
            mask=run_lengths([0] * sample.response_length if weighing is None else sample.trained_mask),
            rollout_log_probs=[_rounded(value, 4) for value in sample.rollout_log_probs],
            weight_versions=run_lengths(sample.weight_versions) or None,
        )
        if weighing is None:
            return record
        return replace(
            record,
            train_step=weighing.train_step,
            advantage=_rounded(weighing.advantage, 7) if self.advantage_by_sample else None,
            denominator=weighing.denominator,
            trajectories=weighing.trajectories,
        )

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = str(self.tokenizer.decode([token], skip_special_tokens=False))
        return self._texts[token]

    def _cut_to_fit(
        self, group: PromptGroup, weighings: dict[tuple[int, int], _Weighing], step: int, room: int
    ) -> Iterator[SampleRecord]:
        for sample, weighing in _known(group, weighings):
            record = self._record(sample, weighing)
            short = replace(record, tokens=None, rollout_log_probs=None, weight_versions=None)
            room -= _size([short], step)
            if room < 0:
                return
            yield short


def _known(
    group: PromptGroup, weighings: Mapping[tuple[int, int], _Weighing]
) -> Iterator[tuple[Sample, _Weighing | None]]:
    """Yield the samples of a group with their entries of the train batch; None if their step leaves them out."""
    seen: dict[int, int] = {}  # samples of each trajectory so far
    for sample in group.samples:
        assert sample.trajectory_id is not None, "scored samples have one"
        index = seen.get(sample.trajectory_id, 0)
        seen[sample.trajectory_id] = index + 1
        yield sample, weighings.get((sample.trajectory_id, index))


def _turn(number: int, wanted: int, groups: int, samples: int) -> list[int]:
    """Return which of its ``samples`` the group at position ``number`` gives to the ``wanted`` ones of all groups.

    >>> [_turn(number, 3, 2, 4) for number in range(2)]
    [[0, 1], [1]]
    """
    share = min(samples, wanted // groups + (number < wanted % groups))
    return sorted((number + i) % samples for i in range(share))


def run_lengths(values: Sequence[int]) -> list[list[int]]:
    """Return ``[[value, count], ...]``.

    >>> run_lengths([1, 1, 0])
    [[1, 2], [0, 1]]
    """
    return [[value, len(list(same))] for value, same in groupby(values)]


def _weighings(shards_by_rank: Sequence[Sequence[TrainShard]], first_step: int) -> dict[tuple[int, int], _Weighing]:
    """Return the values in the batches by (trajectory, index of the sample in it). Ranks may share samples."""
    by_trajectory: dict[int, dict[int, _Weighing]] = {}
    for shards in shards_by_rank:
        for number, shard in enumerate(shards):
            batch = shard.batch
            columns = zip(batch.trajectory_ids, batch.position_in_step, batch.rewards, batch.sample_denoms, strict=True)
            for trajectory, position, advantage, denominator in columns:
                weighing = _Weighing(
                    first_step + number, advantage, denominator, batch.num_trajectories, place=(number, position)
                )
                by_trajectory.setdefault(trajectory, {})[position] = weighing
    return {
        (trajectory, index): by_position[position]
        for trajectory, by_position in by_trajectory.items()
        for index, position in enumerate(sorted(by_position))
    }


def _size(records: Sequence[SampleRecord], step: int) -> int:
    return sum(len(dump_line(record.row(step)).encode("utf-8", "backslashreplace")) for record in records)


def _column(tokens: TokenColumns, name: str) -> list[float | None] | None:
    """Return a column, rounded; None for ratios and weights that are all 1.

    Log-probs get the digits of the engine's, from which they are subtracted.
    """
    shorten = _four_places if name == "log_probs" else _four_digits
    column = [shorten(float(value)) for value in getattr(tokens, name)]
    return None if name in ("ratios", "token_weights") and all(value == 1.0 for value in column) else column


def _four_digits(value: float) -> float | None:
    return float(f"{max(-_LARGEST, min(value, _LARGEST)):.4g}") if math.isfinite(value) else None


def _four_places(value: float) -> float | None:
    return _rounded(max(-_LARGEST_LOG, min(value, _LARGEST_LOG)), 4) if math.isfinite(value) else None


def _rounded(value: float, digits: int) -> float | None:
    return round(float(value), digits) if math.isfinite(value) else None
