"""Several rewards as one: the sum, its parts, and what becomes of an answer that one of them fails on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.base.text import InputError
from miles.rollout.debug_data import load_rollout, save_rollout
from miles.rollout.metrics import rollout_metrics
from miles.tasks.rewards.built_in import REWARDS
from miles.tasks.rewards.registry import WeightedReward, get_reward_function
from miles.tasks.rewards.scoring import RewardError, score
from miles.tasks.rewards.settings import RewardArguments, reward_weights
from miles.types.metrics import values
from miles.types.sample import PromptGroup

names = st.lists(st.sampled_from(list(REWARDS)), min_size=1, max_size=4, unique=True)
weights = st.floats(-100, 100, allow_nan=False).filter(lambda weight: weight != 0)


@given(st.data(), names)
def test_names_and_weights_are_read_as_they_are_written(data, chosen):
    given_weights = {name: data.draw(weights) for name in chosen}
    assert reward_weights(",".join(f"{name}:{weight!r}" for name, weight in given_weights.items())) == given_weights


@pytest.mark.parametrize(
    ("rm_type", "fault"),
    [
        ("mathh:1,length:1", "did you mean math"),
        ("math:1,math:2", "names math twice"),
        ("math:0", "is no weight"),
        ("math:nan,length", "is no weight"),
        ("math:,length", "is no weight"),
        ("math,", "no such reward as ''"),
        ("custom", "alone names no reward"),
    ],
)
def test_faults_in_the_weights(rm_type, fault):
    with pytest.raises(InputError, match=f"--rm-type {rm_type}: .*{fault}"):
        reward_weights(rm_type)


@pytest.mark.parametrize(
    ("reward", "fault"),
    [
        (RewardArguments(rm_type="custom:1,length:1"), "add --custom-rm-path"),
        (RewardArguments(rm_type="overlong:1"), "--overlong-max-len is required"),
        (RewardArguments(rm_type="overlong", overlong_max_len=10), "--overlong-buffer-len 4096: is more than"),
    ],
)
def test_flags_that_do_not_fit_the_rewards(reward, fault):
    with pytest.raises(ValueError, match=fault):
        get_reward_function(reward)


@pytest.mark.parametrize(
    ("rm_type", "optional"),
    [(None, True), ("custom:1,length:1", True), ("custom:1,math:1", False), ("custom:1,regex:1", False)],
)
def test_rows_may_lack_a_label_if_no_part_needs_it(rm_type, optional):
    assert RewardArguments(rm_type=rm_type, custom_rm_path="a:b").labels_optional == optional
    pattern = RewardArguments(rm_type="custom:1,regex:1", custom_rm_path="a:b", reward_regex="x")
    assert pattern.labels_optional and not RewardArguments(rm_type="length").labels_optional


async def test_a_part_that_raises_is_called_again_alone(make_sample):
    calls = []

    async def billed(samples):
        calls.append(len(samples))
        return [1.0] * len(samples)

    async def raises(samples):
        return [float(sample.response) for sample in samples]

    function = WeightedReward({"billed": billed, "mine": raises}, {"billed": 1.0, "mine": 2.0})
    samples = [make_sample(text, trajectory_id=place) for place, text in enumerate(("3", "bad", "4"))]
    with pytest.raises(RewardError, match="mine raised ValueError: could not convert.* trajectory 1, "):
        await score(samples, function, None)
    assert await score(samples, function, -1.0) == 1
    assert [sample.reward for sample in samples] == [7.0, -1.0, 9.0] and calls == [3, 3]


async def test_the_reward_is_the_weighted_sum_and_its_parts_are_kept(make_sample, tmp_path):
    function = get_reward_function(RewardArguments(rm_type="exact_match:2,length:-0.5"))
    samples = [make_sample("abc", "abc"), make_sample("ab", "abc", trajectory_id=1)]
    assert await score(samples, function, None) == 0
    assert [sample.reward for sample in samples] == [2 * 1 + 0.5 * 3, 0.5 * 2]
    assert samples[0].reward_parts == {"exact_match": 1.0, "length": -3.0}
    for sample in samples:
        sample.loss_mask, sample.rollout_log_probs = [1] * len(sample.response), [0.0] * len(sample.response)
    group = PromptGroup(5, samples[0].prompt, samples)
    logged = values(rollout_metrics([group], [group], 0, False))
    assert logged["rollout/reward_parts/exact_match"] == 0.5 and logged["rollout/reward_parts/length"] == -2.5
    save_rollout(str(tmp_path / "{iteration}.jsonl"), 0, [group])
    assert load_rollout(str(tmp_path / "{iteration}.jsonl"), 0)[0].samples == samples


async def test_a_sample_that_one_reward_fails_on_is_named_and_the_others_are_scored(make_sample, caplog):
    function = get_reward_function(RewardArguments(rm_type="last_number:1,length:0.5"))
    samples = [make_sample("7", "7"), make_sample("7", "seven", trajectory_id=1)]
    with pytest.raises(RewardError, match="last_number:1,length:0.5 .*last_number raised ValueError.*trajectory 1"):
        await score(samples, function, None)
    assert await score(samples, function, -1.0) == 1
    assert [sample.reward for sample in samples] == [0.5, -1.0] and samples[1].reward_parts == {}


async def test_a_function_of_the_users_is_a_part(make_sample, tmp_path, monkeypatch):
    (tmp_path / "mine_for_sum.py").write_text("def reward(samples):\n    return [0.25 for _ in samples]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    given_flags = RewardArguments(rm_type="custom:4,length:1", custom_rm_path="mine_for_sum:reward")
    sample = make_sample("abc")
    await score([sample], get_reward_function(given_flags), None)
    assert sample.reward == -2.0 and sample.reward_parts == {"custom": 0.25, "length": -3.0}
