"""Every sample lands in one micro-batch, on the ranks that share it, and ranks agree on the number of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from miles.batch.schedule import schedule_step
from miles.config.parallel import ParallelArguments
from miles.config.training import TrainingArguments
from miles.types.images import ImageTensors
from miles.types.parallel import padded_length

STEPS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 20), st.booleans()), max_size=20)
ALONE = ParallelArguments()
PLAIN = TrainingArguments()


@dataclass(frozen=True)
class Split:
    """How a step is cut."""

    ranks: int
    training: TrainingArguments
    parallel: ParallelArguments


@st.composite
def splits(draw):
    training = draw(
        st.one_of(
            st.builds(TrainingArguments, micro_batch_size=st.integers(1, 5), balance_data=st.booleans()),
            st.builds(
                TrainingArguments,
                use_dynamic_batch_size=st.just(True),
                max_tokens_per_gpu=st.integers(5, 60),
                balance_data=st.booleans(),
            ),
        )
    )
    size, replicas = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 4))
    if draw(st.booleans()):
        layout = draw(st.sampled_from(["thd", "bshd"])) if size == 1 else "thd"
        return Split(size * replicas, training, ParallelArguments(context_parallel_size=size, qkv_format=layout))
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    budget = draw(st.integers(14, 60)) * 2
    return Split(ranks, PLAIN, ParallelArguments(dynamic_context_parallel=True, max_seqlen_per_dp_cp_rank=budget))


def shards_of(make_batch, step, split, flags=None, watch_mass=False):
    batch = make_batch([(prompt, response) for prompt, response, _ in step])
    return schedule_step(batch, split.ranks, split.training, split.parallel, flags, watch_mass)


def kinds(shard):
    return ((shard.micro_batches, True), (shard.score_only, False))


@given(STEPS, splits())
def test_every_sample_once_on_the_ranks_that_share_it(make_batch, step, split):
    has_gradient = {100 + i: flag for i, (_, _, flag) in enumerate(step)}
    shards = shards_of(make_batch, step, split, list(has_gradient.values()))
    assert len(shards) == split.ranks
    trajectory_ids = []
    for rank, shard in enumerate(shards):
        for plans, kind in kinds(shard):
            for plan in plans:
                trajectories = [shard.batch.trajectory_ids[i] for i in plan.samples]
                assert all(has_gradient[t] is kind for t in trajectories)
                if rank % plan.context_parallel_size == 0:  # the first of those that share it
                    trajectory_ids += trajectories
    assert sorted(trajectory_ids) == list(has_gradient)


@given(STEPS, splits())
def test_ranks_that_share_a_micro_batch_have_the_same_samples(make_batch, step, split):
    shards = shards_of(make_batch, step, split, [flag for *_, flag in step])
    for rank, shard in enumerate(shards):
        for number, plan in enumerate(shard.micro_batches):
            size = plan.context_parallel_size
            first = shards[rank // size * size]
            assert first.micro_batches[number].context_parallel_size == size
            assert [first.batch.trajectory_ids[i] for i in first.micro_batches[number].samples] == [
                shard.batch.trajectory_ids[i] for i in plan.samples
            ]


@given(STEPS, splits())
def test_ranks_agree_on_the_number_of_micro_batches(make_batch, step, split):
    shards = shards_of(make_batch, step, split, [flag for *_, flag in step])
    assert len({len(shard.micro_batches) for shard in shards}) == 1 <= len(shards[0].micro_batches)
    assert len({len(shard.score_only) for shard in shards}) == 1
    assert any(flag for *_, flag in step) or len(shards[0].micro_batches) == 1
    assert not all(flag for *_, flag in step) or not shards[0].score_only


@given(STEPS, splits())
def test_micro_batches_keep_their_size(make_batch, step, split):
    training, parallel = split.training, split.parallel
    for shard in shards_of(make_batch, step, split, [flag for *_, flag in step]):
        for plan in (*shard.micro_batches, *shard.score_only):
            size, lengths = plan.context_parallel_size, [shard.batch.total_lengths[i] for i in plan.samples]
            assert plan.padded == (parallel.qkv_format == "bshd") or not lengths
            if parallel.dynamic_context_parallel:
                assert sum(padded_length(n, size) for n in lengths) <= parallel.max_seqlen_per_dp_cp_rank * size
            elif training.use_dynamic_batch_size:
                tokens = sum(padded_length(n, size) for n in lengths)
                if plan.padded:
                    tokens = len(lengths) * max(lengths, default=0)
                assert len(lengths) <= 1 or tokens <= training.max_tokens_per_gpu * size
            else:
                assert len(lengths) <= training.micro_batch_size


@given(STEPS, splits())
def test_all_samples_are_trained_by_default(make_batch, step, split):
    said, unsaid = (shards_of(make_batch, step, split, flags) for flags in ([True] * len(step), None))
    assert [(s.micro_batches, s.score_only) for s in said] == [(s.micro_batches, s.score_only) for s in unsaid]


@given(STEPS, splits())
def test_a_watched_step_has_the_micro_batches_of_an_unwatched_one(make_batch, step, split):
    """Each gets a backward pass. Others would be rounded in another way, and resuming would change a run."""
    flags = [has_gradient for _, _, has_gradient in step]
    plain = shards_of(make_batch, step, split, flags)
    for shard, unwatched in zip(shards_of(make_batch, step, split, flags, watch_mass=True), plain, strict=True):
        assert shard.score_only == []
        assert shard.expected_loss_mass is not None and unwatched.expected_loss_mass is None
        both = [*unwatched.micro_batches, *unwatched.score_only]
        assert [plan for plan in shard.micro_batches if plan.samples] == [plan for plan in both if plan.samples]


def test_more_ranks_than_samples(make_batch):
    shards = schedule_step(make_batch([(2, 3)]), 4, PLAIN, ALONE)
    assert sorted(len(shard.batch) for shard in shards) == [0, 0, 0, 1]
    assert all(len(shard.micro_batches) == 1 for shard in shards)


def test_in_order_without_balancing(make_batch):
    shards = schedule_step(make_batch([(1, 9), (1, 1), (1, 1), (1, 1), (1, 1)]), 2, PLAIN, ALONE)
    assert [shard.batch.trajectory_ids for shard in shards] == [[100, 101], [102, 103, 104]]


def test_balancing_evens_out_tokens(make_batch):
    batch = make_batch([(1, 7), (1, 6), (1, 1), (1, 2)])
    shards = schedule_step(batch, 2, TrainingArguments(balance_data=True), ALONE)
    assert sorted(sum(shard.batch.total_lengths) for shard in shards) == [10, 10]


def test_equal_tokens_with_other_images_are_another_prompt(make_batch):
    batch = make_batch([(10, 2)] * 4)
    batch.tokens[1:] = [batch.tokens[0]] * 3
    one, other, third = (ImageTensors({}, (), (), -1) for _ in range(3))
    batch = replace(batch, images=[one, other, third, third])
    (shard,) = schedule_step(batch, 1, TrainingArguments(use_dynamic_batch_size=True, max_tokens_per_gpu=24), ALONE)
    assert [plan.samples for plan in shard.micro_batches] == [(0, 1), (2, 3)]


def test_a_prompt_counts_as_often_as_it_is_laid_out(make_batch):
    batch = make_batch([(10, 2)] * 4)
    batch.tokens[1:] = [batch.tokens[0]] * 3  # one prompt
    training = TrainingArguments(use_dynamic_batch_size=True, max_tokens_per_gpu=24)
    for share_prompts, sizes in ((True, [4]), (False, [2, 2])):
        (shard,) = schedule_step(batch, 1, training, ALONE, share_prompts=share_prompts)
        assert [len(plan.samples) for plan in shard.micro_batches] == sizes
