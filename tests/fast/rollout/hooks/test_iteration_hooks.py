"""The user's functions on the groups of an iteration."""

from dataclasses import replace

import pytest
from scored_groups import scored_group

from miles.batch.convert import RewardPostProcess, convert
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.objective.settings import LossArguments
from miles.rollout.collect import ScoredGroups
from miles.rollout.hooks import IterationHooks
from miles.tasks.rewards.settings import RewardArguments
from miles.types.metrics import Metric
from miles.types.sample import SampleStatus

FUNCTIONS = """
import numpy as np

SEEN = []

def mark(args, groups):
    for group in groups:
        group[-1].remove_sample = len(group) == args.n_samples_per_prompt

def breaks(args, groups):
    groups[0][0].response_ids.append(7)

def look(args, groups, source):
    SEEN.append(([[s.get_reward_value(args) for s in g] for g in groups], source))

def log(iteration, args, samples, metrics, seconds):
    metrics["rollout/longest"] = np.int64(max(s.response_length for s in samples) + iteration)
    return args.rollout_batch_size == 1

def log_and_clear(iteration, args, samples, metrics, seconds):
    samples.clear()

def log_text(iteration, args, samples, metrics, seconds):
    metrics["note"] = "text"

def post_process(args, samples):
    rewards = [s.get_reward_value(args) for s in samples]
    return rewards, [10 * reward + s.index for reward, s in zip(rewards, samples)]

def last_halves(args, samples):
    # the samples of reward above 0, each in two rows
    kept = [s for s in samples if s.reward > 0]
    return {
        "tokens": [s.tokens for s in kept for _ in range(2)],
        "response_lengths": [s.response_length for s in kept for _ in range(2)],
        "rewards": [s.reward / 2 for s in kept for _ in range(2)],
        "loss_masks": [m for s in kept for m in ([1] + [0] * (s.response_length - 1), [0] + s.loss_mask[1:])],
        "sample_indices": [s.index for s in kept for _ in range(2)],
        "truncated": [0] * 2 * len(kept),
    }

def other(args, samples):
    return {"tokens": [[1, 9]], "response_lengths": [1], "rewards": [1.0], "sample_indices": [0]}

def other_prompt(args, samples):
    return {"tokens": [[1, 1] + samples[0].response_ids], "response_lengths": [4], "rewards": [1.0],
            "loss_masks": [[1] * 4], "sample_indices": [0]}

def unchanged(args, samples):
    kept = samples[::-1][:args.rollout_batch_size]
    return {"tokens": [s.tokens for s in kept], "response_lengths": [s.response_length for s in kept],
            "rewards": [s.reward for s in kept], "sample_indices": [s.index for s in kept]}

def unknown(args, samples):
    return {"tokens": [], "response_lengths": [], "rewards": [], "teacher_log_probs": []}

def half(args, samples):
    return [], [1.0]
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    import importlib
    import sys

    (tmp_path / "hook_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("hook_functions")
    del sys.modules["hook_functions"]


def groups():
    return [
        scored_group(0, [[(3, 1.0)], [(5, 0.0)]], first_trajectory_id=0),
        scored_group(1, [[(2, 0.0)], [(4, 2.0)]], first_trajectory_id=2),
    ]


def apply(iteration=0, scored=None, **rollout):
    settings = Settings(rollout=RolloutArguments(n_samples_per_prompt=2, **rollout))
    scored = scored or ScoredGroups(groups(), {"rollout/tokens": Metric(14.0)})
    return IterationHooks(settings, "the source").apply(iteration, scored, 1.5)


def masks(scored):
    return [sum(sample.trained_mask) for group in scored.groups for sample in group.samples]


def test_nothing_is_called_by_default():
    assert IterationHooks(Settings()).is_idle


def test_samples_of_reward_0_are_not_trained_on_and_advantages_stay():
    result = apply(filter_zero_reward_samples=True)
    assert masks(result) == [3, 0, 0, 4]
    assert result.metrics["rollout/removed_samples"].value == 2
    loss = LossArguments()
    [before], [after] = (convert(g, loss=loss, global_batch_size=4) for g in (groups(), result.groups))
    assert after.rewards == before.rewards and after.num_trajectories == 4
    assert (before.num_loss_tokens, after.num_loss_tokens) == (14, 7)


def test_truncated_samples_are_not_trained_on_and_advantages_stay():
    """The denominators follow the mask: 9 of 14 tokens are left."""
    whole = groups()
    cut = [whole[0].samples[0], whole[1].samples[0]]
    for sample in cut:
        sample.status = SampleStatus.TRUNCATED
    loss = LossArguments(loss_aggregation="token_mean")
    [before] = convert(groups(), loss=loss, global_batch_size=4)
    result = apply(scored=ScoredGroups(whole, {}), mask_truncated_completions=True)
    assert masks(result) == [0, 5, 0, 4] and result.metrics["rollout/removed_samples"].value == 2
    [after] = convert(result.groups, loss=loss, global_batch_size=4)
    assert after.rewards == before.rewards and after.num_trajectories == 4
    assert (before.num_loss_tokens, after.num_loss_tokens) == (14, 9)


def test_removed_samples_count_for_advantages_that_weigh_by_length():
    one = [scored_group(0, [[(2, 0.0)], [(3, 1.0)]], first_trajectory_id=0)]
    result = apply(scored=ScoredGroups(one, {}), filter_zero_reward_samples=True)
    [batch] = convert(result.groups, loss=LossArguments(advantage_estimator="opo"), global_batch_size=2)
    assert batch.rewards == pytest.approx([-0.6, 0.4])
    assert (batch.num_loss_tokens, batch.num_trajectories) == (3, 2)
    assert batch.expected_loss_mass == 0.5


def test_a_function_marks_samples(functions):
    assert masks(apply(rollout_sample_filter_path="hook_functions:mark")) == [3, 0, 2, 0]


def test_a_function_that_breaks_a_sample_is_named(functions):
    with pytest.raises(ValueError, match="--rollout-sample-filter-path hook_functions:breaks: .*one entry per token"):
        apply(rollout_sample_filter_path="hook_functions:breaks")


def test_all_samples_are_shown_dropped_groups_too(functions):
    everything = groups()
    scored = ScoredGroups(everything[:1], {}, tuple(everything))
    apply(scored=scored, rollout_all_samples_process_path="hook_functions:look")
    assert functions.SEEN == [([[1.0, 0.0], [0.0, 2.0]], "the source")]


def test_a_function_adds_metrics_or_replaces_them(functions):
    added = apply(3, custom_rollout_log_function_path="hook_functions:log").metrics
    assert {name: metric.value for name, metric in added.items()} == {"rollout/tokens": 14.0, "rollout/longest": 9.0}
    replaced = apply(3, custom_rollout_log_function_path="hook_functions:log", rollout_batch_size=1).metrics
    assert list(replaced) == ["rollout/longest"]
    with pytest.raises(ValueError, match="the metric note is 'text'"):
        apply(custom_rollout_log_function_path="hook_functions:log_text")


def test_a_function_makes_the_advantages(functions):
    path = "hook_functions:post_process"
    settings = Settings(reward=RewardArguments(custom_reward_post_process_path=path))
    [batch] = convert(
        groups(), loss=LossArguments(), global_batch_size=4, advantages_of=RewardPostProcess(path, settings)
    )
    assert batch.rewards == [10.0, 1.0, 2.0, 23.0]
    wrong = replace(settings.reward, custom_reward_post_process_path="hook_functions:half")
    with pytest.raises(ValueError, match="returned 1 advantages for 4 samples"):
        RewardPostProcess("hook_functions:half", replace(settings, reward=wrong))(
            [sample for group in groups() for sample in group.samples]
        )


def test_a_function_makes_what_is_trained_on(functions):
    path, log = "hook_functions:last_halves", "hook_functions:log_and_clear"
    result = apply(custom_convert_samples_to_train_data_path=path, custom_rollout_log_function_path=log).groups
    assert [(len(group.samples), group.dropped_trajectories) for group in result] == [(2, 1), (2, 1)]
    [batch] = convert(result, loss=LossArguments(), global_batch_size=4)
    assert (batch.rewards, batch.trajectory_ids) == ([0.5, 0.5, 1.0, 1.0], [0, 0, 3, 3])
    assert [mask.sum() for mask in batch.loss_masks] == [1, 2, 1, 3]
    assert batch.num_trajectories == 2 and batch.num_loss_tokens == 7


def test_a_row_that_repeats_a_sample_has_its_masks_and_is_removed_with_it(functions):
    path = "hook_functions:unchanged"
    split = [scored_group(0, [[(2, 1.0), (3, 1.0)], [(4, 0.0)]], first_trajectory_id=0)]
    result = apply(
        scored=ScoredGroups(split, {}),
        rollout_batch_size=3,
        filter_zero_reward_samples=True,
        custom_convert_samples_to_train_data_path=path,
    )
    assert masks(result) == [0, 3, 2]
    [batch] = convert(result.groups, loss=LossArguments(), global_batch_size=2)
    assert [mask.tolist() for mask in batch.loss_masks] == [[0] * 5, [1, 1, 1, 0], [1, 1, 0]]


def test_a_conversion_that_leaves_nothing_of_a_step_is_named(functions):
    result = apply(rollout_batch_size=1, custom_convert_samples_to_train_data_path="hook_functions:unchanged")
    with pytest.raises(ValueError, match="--custom-convert-samples-to-train-data-path: it returned no row"):
        convert(result.groups, loss=LossArguments(), global_batch_size=2)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("other", "row 0 has other tokens than the samples of trajectory 0; give its loss_masks and rollout_log_"),
        ("other_prompt", "row 0 has other tokens than the samples of trajectory 0; give its rollout_log_probs"),
        ("unknown", "has teacher_log_probs, which is not read here"),
        ("half", "returned .*; return columns by name"),
    ],
)
def test_a_wrong_conversion_is_refused(functions, name, told):
    with pytest.raises(ValueError, match=f"-to-train-data-path hook_functions:{name}: .*{told}"):
        apply(custom_convert_samples_to_train_data_path=f"hook_functions:{name}")
