"""Every sample lands on one rank and in one micro-batch, and ranks agree on the number of micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from miles.arguments.training import TrainingArguments
from miles.batching.schedule import schedule_step

STEPS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 20), st.booleans()), max_size=20)
TRAINING = st.one_of(
    st.builds(TrainingArguments, micro_batch_size=st.integers(1, 5), balance_data=st.booleans()),
    st.builds(
        TrainingArguments,
        use_dynamic_batch_size=st.just(True),
        max_tokens_per_gpu=st.integers(5, 60),
        balance_data=st.booleans(),
    ),
)
WORLDS = st.integers(1, 6)


@given(STEPS, WORLDS, TRAINING)
def test_every_sample_once_in_micro_batches_of_its_kind(make_batch, step, world, training):
    batch = make_batch([(prompt, response) for prompt, response, _ in step])
    has_gradient = {100 + i: flag for i, (_, _, flag) in enumerate(step)}
    shards = schedule_step(batch, world, training, list(has_gradient.values()))
    assert len(shards) == world
    assert sorted(r for shard in shards for r in shard.batch.rollout_ids) == list(has_gradient)
    for shard in shards:
        for micro_batches, kind in ((shard.micro_batches, True), (shard.score_only, False)):
            found = sorted(shard.batch.rollout_ids[i] for part in micro_batches for i in part)
            assert found == sorted(r for r in shard.batch.rollout_ids if has_gradient[r] is kind)


@given(STEPS, WORLDS, TRAINING)
def test_ranks_agree_on_the_number_of_micro_batches(make_batch, step, world, training):
    batch = make_batch([(prompt, response) for prompt, response, _ in step])
    shards = schedule_step(batch, world, training, [flag for *_, flag in step])
    assert len({len(shard.micro_batches) for shard in shards}) == 1 <= len(shards[0].micro_batches)
    assert len({len(shard.score_only) for shard in shards}) == 1
    assert any(flag for *_, flag in step) or len(shards[0].micro_batches) == 1
    assert not all(flag for *_, flag in step) or not shards[0].score_only


@given(STEPS, WORLDS, TRAINING)
def test_micro_batches_keep_their_size(make_batch, step, world, training):
    batch = make_batch([(prompt, response) for prompt, response, _ in step])
    for shard in schedule_step(batch, world, training, [flag for *_, flag in step]):
        for part in (*shard.micro_batches, *shard.score_only):
            if training.use_dynamic_batch_size:
                tokens = sum(shard.batch.total_lengths[i] for i in part)
                assert len(part) <= 1 or tokens <= training.max_tokens_per_gpu
            else:
                assert len(part) <= training.micro_batch_size


@given(STEPS, WORLDS, TRAINING)
def test_all_train_where_nothing_is_said(make_batch, step, world, training):
    batch = make_batch([(prompt, response) for prompt, response, _ in step])
    said = schedule_step(batch, world, training, [True] * len(step))
    unsaid = schedule_step(batch, world, training)
    assert [(s.micro_batches, s.score_only) for s in said] == [(s.micro_batches, s.score_only) for s in unsaid]


def test_more_ranks_than_samples(make_batch):
    shards = schedule_step(make_batch([(2, 3)]), 4, TrainingArguments())
    assert sorted(len(shard.batch) for shard in shards) == [0, 0, 0, 1]
    assert all(len(shard.micro_batches) == 1 for shard in shards)


def test_in_order_without_balancing(make_batch):
    shards = schedule_step(make_batch([(1, 9), (1, 1), (1, 1), (1, 1), (1, 1)]), 2, TrainingArguments())
    assert [shard.batch.rollout_ids for shard in shards] == [[100, 101], [102, 103, 104]]


def test_balancing_evens_out_tokens(make_batch):
    shards = schedule_step(make_batch([(1, 7), (1, 6), (1, 1), (1, 2)]), 2, TrainingArguments(balance_data=True))
    assert sorted(sum(shard.batch.total_lengths) for shard in shards) == [10, 10]
