"""The stored samples of an iteration agree with its train batches, and stay within their bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scored_groups import scored_group
from tolerance import places

from miles.batch.convert import convert
from miles.objective.settings import LossArguments
from miles.observe.report.ledger import expand, share, token_columns
from miles.observe.run_files import SampleRecord, dump_line
from miles.observe.sample_records import ALL, SampleRecorder, run_lengths, token_columns_of
from miles.types.sample import PromptGroup
from miles.types.train_batch import TokenColumns, TrainShard


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, token_ids, *, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(chr(97 + token % 26) for token in token_ids)


COLUMNS = ("log_probs", "ratios", "token_weights", "advantages")


def group(index: int, *lengths: int) -> PromptGroup:
    """Return a group of trajectories with these numbers of loss tokens, whose rewards differ."""
    trajectories = [[(length, float(i))] for i, length in enumerate(lengths)]
    return scored_group(index, trajectories, first_trajectory_id=10 * index)


def recorder(max_bytes: int = 10**9, num_iterations: int = 1, **changes) -> SampleRecorder:
    fields = {"steps_per_iteration": 2, "advantage_by_sample": True} | changes
    return SampleRecorder(Letters(), max_bytes=max_bytes, num_iterations=num_iterations, **fields)


def shards_of(groups: list[PromptGroup], loss: LossArguments, global_batch_size: int, ranks: int = 2):
    """Deal the samples of each step out to ranks; the ranks share the first sample."""
    batches = convert(groups, loss=loss, global_batch_size=global_batch_size)
    return batches, [
        [TrainShard(batch.select([0, *range(1 + rank, len(batch), ranks)]), []) for batch in batches]
        for rank in range(ranks)
    ]


def rows(records: list[SampleRecord], step: int = 2) -> list[dict]:
    return [record.row(step) for record in records]


def test_the_mask_of_a_removed_sample_is_the_one_that_is_trained_with():
    removed = group(0, 2, 6)
    removed.samples[1].remove_sample = True
    batches, shards = shards_of([removed], LossArguments(), global_batch_size=2)
    stored = recorder().record(0, [removed], shards).records
    masks = [mask.tolist() for mask in batches[0].loss_masks]
    assert [expand(record.mask) for record in stored] == masks == [[1, 1, 0], [0] * 7]


def test_samples_that_their_step_leaves_out_are_stored_without_weight() -> None:
    groups = [group(0, 2, 6), scored_group(1, [[(3, 1.0)], [(4, 1.0)]], first_trajectory_id=10)]
    loss = LossArguments(drop_zero_std_groups=True)
    batches, shards = shards_of(groups, loss, global_batch_size=4)
    stored = recorder(token_values=ALL, token_columns=("log_probs",)).record(0, groups, shards)
    assert batches[0].num_trajectories == 2 and set(stored.places) == {0, 1}
    assert [share(row) for row in rows(stored.records)] == [pytest.approx(0.5), pytest.approx(0.5), None, None]
    assert [sum(expand(record.mask)) for record in stored.records] == [2, 6, 0, 0]


MODES = ["sample_mean", "prompt_mean", "token_mean", "constant"]


@pytest.mark.parametrize("mode", MODES)
def test_shares_add_up_to_the_loss_mass_of_each_step(mode: str) -> None:
    groups = [group(0, 2, 6), group(1, 4, 8)]
    loss = LossArguments(loss_aggregation=mode, loss_aggregation_divisor=8.0 if mode == "constant" else None)
    batches, shards = shards_of(groups, loss, global_batch_size=2)
    stored = rows(recorder().record(0, groups, shards).records)
    assert len(stored) == 4
    for number, batch in enumerate(batches):
        of_step = [row for row in stored if row["train_step"] == number + 1]
        assert sum(share(row) for row in of_step) == pytest.approx(batch.expected_loss_mass)
        assert sum(sum(token_columns(row)["weight"]) for row in of_step) == pytest.approx(batch.expected_loss_mass)
        assert [row["advantage"] for row in of_step] == pytest.approx(batch.rewards, abs=places(7))


def test_samples_of_a_split_trajectory_keep_their_order() -> None:
    groups = [scored_group(0, [[(1, 1.0), (2, 1.0)], [(3, 0.0)]], first_trajectory_id=5)]
    _, shards = shards_of(groups, LossArguments(), global_batch_size=2)
    stored = rows(recorder().record(0, groups, shards).records)
    entries = [(row["trajectory"], sum(expand(row["mask"])), row["denominator"]) for row in stored]
    assert entries == [(5, 1, 3.0), (5, 2, 3.0), (6, 3, 3.0)]


def test_an_advantage_that_the_trainer_makes_is_not_stored() -> None:
    groups = [group(0, 1, 2)]
    _, shards = shards_of(groups, LossArguments(), global_batch_size=2)
    stored = rows(recorder(advantage_by_sample=False).record(0, groups, shards).records)
    assert all("advantage" not in row for row in stored) and len(stored) == 2


@given(st.integers(0, 9000), st.integers(1, 6), st.integers(1, 8), st.integers(-1, 5), st.integers(0, 2**32 - 1))
def test_the_file_never_exceeds_its_bound(
    max_bytes: int, iterations: int, count: int, token_values: int, seed: int
) -> None:
    made = recorder(max_bytes, iterations, token_values=token_values, token_columns=COLUMNS)
    spent = 0
    for iteration in range(iterations):
        groups = [group(i, 1, 1 + 7 * i) for i in range(count)]
        _, shards = shards_of(groups, LossArguments(), global_batch_size=2 * count)
        made_records = made.record(iteration, groups, shards)
        stored = made_records.completed(any_tokens(made_records.marked(shards), seed))
        spent += sum(len(dump_line(row).encode()) for row in rows(stored, 2 * (iteration + 1)))
        assert spent <= max_bytes * (iteration + 1) // iterations
        assert [record.trajectory for record in stored] == sorted(record.trajectory for record in stored)


def any_tokens(marked: list[list[TrainShard]], seed: int) -> dict:
    """Return columns of any fp32 numbers for the samples that are marked in the shards."""
    rng = np.random.default_rng(seed)
    return {
        (step, position): TokenColumns(*rng.integers(0, 2**32, (4, length), np.uint32).view(np.float32))
        for shards in marked
        for step, shard in enumerate(shards)
        for position, length in zip(shard.batch.position_in_step, shard.batch.response_lengths, strict=True)
        if position in shard.recorded
    }


@pytest.mark.parametrize(("wanted", "chosen"), [(0, 0), (3, 3), (99, 8), (-1, 8)])
def test_the_trainer_completes_as_many_samples_as_are_asked_for(wanted: int, chosen: int) -> None:
    groups = [group(0, 2, 6), group(1, 4, 8), group(2, 1, 1), group(3, 1, 1)]
    _, shards = shards_of(groups, LossArguments(), global_batch_size=4)
    made = recorder(token_values=wanted, token_columns=COLUMNS).record(0, groups, shards)
    completed = made.completed(any_tokens(made.marked(shards), seed=0))
    with_values = [record for record in completed if record.log_probs]
    assert len(with_values) == chosen and len({record.group for record in with_values}) == min(4, chosen)
    for record in with_values:
        assert len(record.log_probs) == len(record.ratios) == len(record.tokens)


def test_a_sample_gets_its_own_tokens_and_columns_that_say_nothing_are_left_out() -> None:
    groups = [group(0, 2, 6), group(1, 4, 8)]
    batches, shards = shards_of(groups, LossArguments(), global_batch_size=2)
    made = recorder(token_values=-1, token_columns=COLUMNS).record(0, groups, shards)
    tokens = {
        (step, position): TokenColumns(
            advantages=np.full(n, -0.5, np.float32),
            log_probs=np.full(n, -100.0 * step - position - 0.123456, np.float32),
            ratios=np.ones(n, np.float32),
            token_weights=np.full(n, np.nan, np.float32),
        )
        for step, batch in enumerate(batches)
        for position, n in enumerate(batch.response_lengths)
    }
    for record in made.completed(tokens):
        step, position = record.train_step - 1, batches[record.train_step - 1].trajectory_ids.index(record.trajectory)
        [log_prob] = set(record.log_probs)
        assert log_prob == pytest.approx(-100.0 * step - position - 0.123456, abs=places(4))
        assert record.ratios is None and set(record.token_weights) == {None} and set(record.advantages) == {-0.5}
        assert len(record.log_probs) == len(record.tokens)


def test_a_run_stores_the_columns_that_can_say_something() -> None:
    assert token_columns_of(LossArguments(), 1) == ("log_probs",)
    assert token_columns_of(LossArguments(loss_type="sft_loss"), 1) == ()
    assert token_columns_of(LossArguments(use_tis=True, advantage_estimator="ppo"), 2) == COLUMNS


def test_whole_groups_spread_over_the_iteration_are_chosen() -> None:
    groups = [group(i, 1, 2) for i in range(8)]
    _, shards = shards_of(groups, LossArguments(), global_batch_size=16)
    everything = recorder().record(0, groups, shards).records
    size = sum(len(dump_line(row)) for row in rows(everything))
    stored = recorder(size * 2 // 5).record(0, groups, shards).records
    assert [record.group for record in stored] == [0, 0, 2, 2, 4, 4]


def test_what_an_iteration_leaves_is_there_for_the_next() -> None:
    groups = [group(i, 1, 2) for i in range(4)]
    _, shards = shards_of(groups, LossArguments(), global_batch_size=8)
    size = sum(len(dump_line(row)) for row in rows(recorder().record(0, groups, shards).records))
    made = recorder(2 * size, 2)
    made.record(0, groups[:1], shards)  # leaves three quarters of its half
    assert len(made.record(1, groups, shards).records) == 8


def test_a_group_that_does_not_fit_is_stored_without_its_tokens() -> None:
    groups = [group(0, 400, 400)]
    _, shards = shards_of(groups, LossArguments(), global_batch_size=2)
    stored = recorder(700).record(0, groups, shards).records
    assert stored and all(record.tokens is None for record in stored)
    assert share(rows(stored)[0]) == pytest.approx(0.5)


def test_nothing_is_stored_with_a_bound_of_zero() -> None:
    assert recorder(0).record(0, [group(0, 1, 1)], []).records == []


@given(st.lists(st.integers(-1, 3)))
def test_run_lengths_expand_to_what_they_came_from(values: list[int]) -> None:
    assert expand(run_lengths(values)) == values
