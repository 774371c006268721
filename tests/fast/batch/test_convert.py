from dataclasses import fields
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scored_groups import scored_group
from tolerance import DOUBLE_ERROR

from miles.batch.convert import convert
from miles.objective.settings import LossArguments
from miles.types.sample import PromptGroup

MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")


@st.composite
def group_shapes(draw):
    """Groups of trajectories of samples (loss tokens, reward); the samples of one trajectory share its reward."""

    def trajectory():
        reward = draw(st.sampled_from([0.0, 0.5, 1.0]))
        return [(tokens, reward) for tokens in draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))]

    return [[trajectory() for _ in range(draw(st.integers(1, 4)))] for _ in range(draw(st.integers(1, 4)))]


def build(shapes):
    ids, groups = count(), []
    for index, shape in enumerate(shapes):
        groups.append(scored_group(index, shape, next(ids)))
        for _ in shape[1:]:
            next(ids)
    return groups


def loss_for(mode, **options):
    return LossArguments(loss_aggregation=mode, loss_aggregation_divisor=8.0 if mode == "constant" else None, **options)


@pytest.mark.parametrize(
    ("mode", "denoms", "pg_loss"),
    [
        ("sample_mean", [2, 6, 4, 8], 0.25),
        ("prompt_mean", [4, 4, 6, 6], 0.125),
        ("token_mean", [5, 5, 5, 5], 0.1),
        ("constant", [8, 8, 8, 8], 0.0625),
    ],
)
def test_the_worked_example(mode, denoms, pg_loss):
    groups = build([[[(2, 1.0)], [(6, 0.0)]], [[(4, 1.0)], [(8, 0.0)]]])
    (batch,) = convert(groups, loss=loss_for(mode), global_batch_size=4)
    assert batch.sample_denoms == pytest.approx(denoms)
    assert 2 / batch.sample_denoms[0] / batch.num_trajectories == pytest.approx(pg_loss)
    assert (batch.num_trajectories, batch.num_loss_tokens) == (4, 20)
    assert batch.trajectory_token_counts == [2, 6, 4, 8]


@given(shapes=group_shapes(), size=st.integers(1, 6))
def test_steps_are_whole_trajectories_in_group_order(shapes, size):
    groups = build(shapes)
    steps = convert(groups, loss=LossArguments(), global_batch_size=size)
    assert [i for step in steps for i in step.trajectory_ids] == [s.trajectory_id for g in groups for s in g.samples]
    per_step = [set(step.trajectory_ids) for step in steps]
    assert sum(map(len, per_step)) == len(set().union(*per_step)), "a trajectory is in two steps"
    assert all(len(ids) == size for ids in per_step[:-1]) and 1 <= len(per_step[-1]) <= size
    for step in steps:
        assert step.num_trajectories == len(set(step.trajectory_ids))
        assert step.num_loss_tokens == sum(mask.sum() for mask in step.loss_masks)


@pytest.mark.parametrize("mode", MODES)
@given(shapes=group_shapes())
def test_the_mass_of_a_step_is_what_its_denominators_say(mode, shapes):
    (batch,) = convert(build(shapes), loss=loss_for(mode), global_batch_size=1000)
    pairs = zip(batch.loss_masks, batch.sample_denoms, strict=True)
    mass = sum(float(mask.sum()) / denom for mask, denom in pairs if mask.sum()) / batch.num_trajectories
    assert mass == pytest.approx(batch.expected_loss_mass)


@given(shapes=group_shapes(), size=st.integers(1, 6), whiten=st.booleans())
def test_cutting_into_steps_changes_no_reward(shapes, size, whiten):
    loss = LossArguments(disable_grpo_std_normalization=not whiten)
    groups = build(shapes)
    (whole,) = convert(groups, loss=loss, global_batch_size=1000)
    steps = convert(groups, loss=loss, global_batch_size=size)
    assert [r for step in steps for r in step.rewards] == whole.rewards


def test_interleaved_samples_of_a_trajectory_come_together():
    (group,) = build([[[(1, 0.0), (2, 0.0)], [(3, 1.0)]]])
    group.samples = [group.samples[i] for i in (0, 2, 1)]
    first, second = convert([group], loss=LossArguments(), global_batch_size=1)
    assert (first.trajectory_ids, second.trajectory_ids) == ([0, 0], [1])
    assert first.rewards[0] == first.rewards[1] < 0 < second.rewards[0]


def test_columns_are_those_of_the_samples():
    groups = build([[[(2, 1.0)], [(0, 0.0)]]])
    (batch,) = convert(groups, loss=LossArguments(disable_rewards_normalization=True), global_batch_size=2)
    assert batch.rewards == [1.0, 0.0]
    for i, sample in enumerate(groups[0].samples):
        np.testing.assert_array_equal(batch.tokens[i], sample.tokens)
        np.testing.assert_array_equal(batch.loss_masks[i], sample.loss_mask)
        np.testing.assert_array_equal(batch.rollout_log_probs[i], np.float32(sample.rollout_log_probs))
        assert batch.response_lengths[i] == len(sample.response_ids)
    assert (batch.tokens[0].dtype, batch.loss_masks[0].dtype) == (np.int64, np.float32)
    columns = [getattr(batch, f.name) for f in fields(batch)]
    assert {len(c) for c in columns if isinstance(c, list)} == {2}


def test_prompt_mean_never_cuts_a_group():
    groups = build([[[(1, 0.0)]] * 4] * 3)
    assert [len(s) for s in convert(groups, loss=loss_for("prompt_mean"), global_batch_size=8)] == [8, 4]
    with pytest.raises(ValueError, match="--global-batch-size 6: a step would cut prompt group 1 of 4 trajectories"):
        convert(groups, loss=loss_for("prompt_mean"), global_batch_size=6)
    uneven = build([[[(1, 0.0)]] * 4, [[(1, 0.0)]] * 3])
    with pytest.raises(ValueError, match="here they have 3 to 4 trajectories"):
        convert(uneven, loss=loss_for("prompt_mean"), global_batch_size=6)
    assert [len(s) for s in convert(groups, loss=LossArguments(), global_batch_size=6)] == [6, 6]


def test_an_estimator_that_compares_groups_on_the_trainer_has_them_whole():
    """Groups may be smaller than ``--n-samples-per-prompt``, which the flags are checked with."""
    loss = LossArguments(advantage_estimator="optimal_token_baseline")
    uneven = build([[[(1, 0.0)]] * 4, [[(1, 0.0)]] * 3, [[(1, 0.0)]] * 4])
    assert [len(s) for s in convert(uneven, loss=loss, global_batch_size=7)] == [7, 4]
    message = "--advantage-estimator optimal_token_baseline with --global-batch-size 8: .* group 2 .* baseline would be"
    with pytest.raises(ValueError, match=message):
        convert(uneven, loss=loss, global_batch_size=8)


@pytest.mark.parametrize("normalized", [True, False])
def test_a_reward_that_is_not_finite_is_refused(normalized):
    groups = build([[[(2, 1.0)], [(3, float("nan"))]]])
    loss = LossArguments(disable_rewards_normalization=not normalized)
    with pytest.raises(ValueError, match="nan for trajectory 1 of prompt group 0; a reward must be finite"):
        convert(groups, loss=loss, global_batch_size=2)


def test_fine_tuning_needs_no_rewards():
    groups = build([[[(2, 1.0)], [(3, 0.0)]]])
    for sample in groups[0].samples:
        sample.reward = None
    (batch,) = convert(groups, loss=LossArguments(loss_type="sft_loss"), global_batch_size=2)
    assert batch.rewards == [0.0, 0.0]


def test_a_column_of_the_wrong_length_is_refused():
    groups = build([[[(2, 1.0)]]])
    groups[0].samples[0].loss_mask.pop()
    with pytest.raises(ValueError, match="loss_mask has 2 entries for 3 response tokens"):
        convert(groups, loss=LossArguments(), global_batch_size=1)


def test_rewards_are_normalized_as_the_flags_say():
    groups = build([[[(2, 1.0)], [(2, 0.0)], [(2, 0.0)], [(2, 0.0)]]])
    (centred,) = convert(groups, loss=LossArguments(disable_grpo_std_normalization=True), global_batch_size=4)
    (scaled,) = convert(groups, loss=LossArguments(), global_batch_size=4)
    assert centred.rewards == pytest.approx([0.75, -0.25, -0.25, -0.25])
    deviation = 0.5 + 1e-6  # the unbiased one
    assert scaled.rewards == pytest.approx([reward / deviation for reward in centred.rewards], rel=DOUBLE_ERROR)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("ppo", [1.0, 0.0, 0.0, 0.0]),
        ("reinforce_plus_plus", [1.0, 0.0, 0.0, 0.0]),
        ("reinforce_plus_plus_baseline", [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_rewards_of_estimators_by_token(estimator, expected):
    groups = build([[[(2, 1.0)], [(2, 0.0)], [(2, 0.0)], [(2, 0.0)]]])
    (batch,) = convert(groups, loss=LossArguments(advantage_estimator=estimator), global_batch_size=4)
    assert batch.rewards == pytest.approx(expected) and batch.position_in_step == [0, 1, 2, 3]


def drop(groups, dropped):
    """Remove trajectories as ``--reward-error drop`` does."""
    new_groups = []
    for group in groups:
        samples = [s for s in group.samples if s.trajectory_id not in dropped]
        lost = len({s.trajectory_id for s in group.samples}) - len({s.trajectory_id for s in samples})
        new_groups.append(PromptGroup(group.group_index, group.prompt, samples, dropped_trajectories=lost))
    return [group for group in new_groups if group.samples]


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
def test_a_step_with_dropped_trajectories_is_the_mean_over_the_others(mode, data):
    lengths = data.draw(st.lists(st.lists(st.integers(1, 6), min_size=3, max_size=3), min_size=2, max_size=4))
    dropped = data.draw(st.sets(st.integers(0, 3 * len(lengths) - 1), max_size=4))
    groups = build([[[(n, float(n % 3))] for n in group] for group in lengths])
    remaining = drop(groups, dropped)
    if len(remaining) < len(groups):
        return  # another prompt is drawn instead
    (batch,) = convert(remaining, loss=loss_for(mode), global_batch_size=3 * len(lengths))
    left = [[n for k, n in enumerate(group) if 3 * g + k not in dropped] for g, group in enumerate(lengths)]
    tokens = [n for group in left for n in group]
    N, T = len(tokens), sum(tokens)
    weights = {
        "sample_mean": [1 / (N * n) for n in tokens],
        "prompt_mean": [1 / (len(left) * sum(group)) for group in left for _ in group],
        "token_mean": [1 / T for _ in tokens],
        "constant": [1 / (8 * N) for _ in tokens],
    }[mode]
    assert batch.num_trajectories == N
    assert [1 / (denominator * N) for denominator in batch.sample_denoms] == pytest.approx(weights)


@pytest.mark.parametrize("mode", MODES)
def test_steps_are_cut_where_they_would_be_without_drops(mode):
    groups = build([[[(2, 1.0)], [(3, 0.0)]] for _ in range(4)])  # trajectories 0 to 7
    steps = convert(drop(groups, {0, 5}), loss=loss_for(mode), global_batch_size=4)
    assert [step.trajectory_ids for step in steps] == [[1, 2, 3], [4, 6, 7]]
    assert [step.num_trajectories for step in steps] == [3, 3]


def test_a_step_of_which_nothing_is_left_is_refused():
    groups = build([[[(2, 1.0)], [(3, 0.0)], [(3, 0.0)]] for _ in range(2)])
    with pytest.raises(ValueError, match="--reward-error drop: .* failed on every trajectory of an optimizer step"):
        convert(drop(groups, {1}), loss=loss_for("sample_mean"), global_batch_size=1)


def test_the_statistics_of_a_group_are_those_of_the_trajectories_left():
    groups = drop(build([[[(2, 1.0)], [(3, 0.0)], [(3, 5.0)]], [[(2, 1.0)], [(3, 0.0)], [(3, 5.0)]]]), {2, 4, 5})
    (batch,) = convert(groups, loss=loss_for("sample_mean", disable_grpo_std_normalization=True), global_batch_size=6)
    assert batch.rewards == [0.5, -0.5, 0.0], "alone in its group, a trajectory has advantage 0"


@pytest.mark.parametrize("mode", MODES)
@given(shapes=group_shapes(), size=st.integers(1, 6))
def test_without_groups_of_equal_rewards_a_step_is_the_mean_over_the_others(mode, shapes, size):
    """All groups determine its advantages and its position; a step without other groups keeps these."""
    loss = loss_for(mode, drop_zero_std_groups=True)
    size = sum(map(len, shapes)) if mode == "prompt_mean" else size
    whole = convert(build(shapes), loss=loss_for(mode), global_batch_size=size)
    left = convert(build(shapes), loss=loss, global_batch_size=size)
    assert len(left) == len(whole)
    equal = {group for group, shape in enumerate(shapes) if len({reward for [(_, reward), *_] in shape}) == 1}
    for all_of_them, batch in zip(whole, left, strict=True):
        stays = [group not in equal for group in all_of_them.group_indices]
        if not any(stays):
            stays = [True] * len(stays)
        rows = [row for row, stay in enumerate(stays) if stay]
        assert batch.rewards == [all_of_them.rewards[row] for row in rows]
        assert batch.trajectory_ids == [all_of_them.trajectory_ids[row] for row in rows]
        trajectories = {all_of_them.trajectory_ids[row] for row in rows}
        assert batch.num_trajectories == len(trajectories)
        if mode == "constant":
            assert batch.sample_denoms == pytest.approx([8.0] * len(rows))
        if mode == "token_mean":
            tokens = sum(mask.sum() for mask in batch.loss_masks)
            assert batch.sample_denoms == pytest.approx([max(tokens, 1) / len(trajectories)] * len(rows))
