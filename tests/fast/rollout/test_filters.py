import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.objective.chosen import build_objective
from miles.objective.estimators.base import SampleRewards
from miles.objective.settings import LossArguments
from miles.rollout import filters
from miles.rollout.filters import (
    FilterDecision,
    check_deciding_reward_nonzero_std,
    check_reward_nonzero_std,
    load_group_filter,
)
from miles.types.sample import Prompt, PromptGroup, Sample

PROMPT = Prompt("p", (1,), source="set.jsonl:1")


def group_with(rewards):
    return PromptGroup(7, PROMPT, [Sample(PROMPT, 7, trajectory_id=i, reward=r) for i, r in enumerate(rewards)])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8))
def test_groups_without_reward_spread_are_dropped(rewards):
    assert check_reward_nonzero_std(group_with(rewards)).keep == (min(rewards) != max(rewards))


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 9))
def test_equal_rewards_have_no_spread_whatever_their_size(reward, n):
    assert check_reward_nonzero_std(group_with([reward] * n)) == FilterDecision(False, "zero_std")


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=3), min_size=2, max_size=4))
def test_a_group_is_dropped_exactly_if_all_its_advantages_are_zero(rewards):
    """Samples of a trajectory may be rewarded apart from each other."""
    pairs = [(trajectory, reward) for trajectory, of_samples in enumerate(rewards) for reward in of_samples]
    group = PromptGroup(7, PROMPT, [Sample(PROMPT, 7, trajectory, reward=reward) for trajectory, reward in pairs])
    samples = SampleRewards(group.rewards, [7] * len(pairs), [trajectory for trajectory, _ in pairs])
    for estimator in ("grpo", "rloo"):
        objective = build_objective(LossArguments(advantage_estimator=estimator))
        assert check_reward_nonzero_std(group).keep == any(objective.sample_advantages(samples))


@given(st.lists(st.tuples(st.sampled_from([-1.0, 1.0]), st.floats(-1, 0)), min_size=1, max_size=8))
def test_a_penalty_does_not_tell_answers_apart_that_are_equally_right(parts):
    group = group_with([dapo + overlong for dapo, overlong in parts])
    for sample, (dapo, overlong) in zip(group.samples, parts, strict=True):
        sample.reward_parts = {"overlong": overlong, "dapo": dapo}
    assert check_deciding_reward_nonzero_std(group).keep == (len({dapo for dapo, _ in parts}) > 1)
    for sample in group.samples:
        sample.reward_parts = {}
    assert check_deciding_reward_nonzero_std(group) == check_reward_nonzero_std(group), "of a single reward"


@pytest.mark.parametrize(
    ("answer", "decision"),
    [
        (True, FilterDecision(True)),
        (False, FilterDecision(False, "filtered")),
        (FilterDecision(False), FilterDecision(False, "filtered")),
        (FilterDecision(False, "too_easy"), FilterDecision(False, "too_easy")),
    ],
)
def test_a_filter_may_answer_with_a_bool(monkeypatch, answer, decision):
    monkeypatch.setattr(filters, "mine", lambda group: answer, raising=False)
    assert load_group_filter("miles.rollout.filters:mine")(group_with([1.0])) == decision


def test_any_other_answer_is_refused(monkeypatch):
    monkeypatch.setattr(filters, "mine", lambda group: 0.5, raising=False)
    decide = load_group_filter("miles.rollout.filters:mine")
    with pytest.raises(
        ValueError, match=r"--dynamic-sampling-filter-path miles\S+: .*0\.5 for group 7 \(set\.jsonl:1\)"
    ):
        decide(group_with([1.0]))


def test_a_wrong_path_names_the_flag():
    with pytest.raises(ValueError, match="--dynamic-sampling-filter-path miles.rollout.filters:no_such"):
        load_group_filter("miles.rollout.filters:no_such")
