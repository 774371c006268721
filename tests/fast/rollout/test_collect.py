import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.base.user_code import UserCodeError
from miles.config.rollout import RolloutArguments, fill_over_sampling
from miles.config.settings import Settings
from miles.engine.base import SamplingParams
from miles.rollout import filters
from miles.rollout.collect import BurstCollector, leaving_out_mastered
from miles.rollout.filters import MAX_STALLED_BURSTS, MIN_STALLED_BURSTS, FilterDecision
from miles.rollout.groups import GroupSpec, GroupTools, ProducedGroup, generate_group, produce_group
from miles.rollout.pipeline import build_collector
from miles.tasks.data.settings import DataArguments
from miles.tasks.data.stream import NoPromptsLeft, PromptStream
from miles.tasks.rewards.settings import RewardArguments
from miles.types.sample import Prompt, PromptGroup, Sample

NONZERO_STD = "miles.rollout.filters:check_reward_nonzero_std"
MINE = "miles.rollout.filters:mine"


async def odd_length(samples):
    return [float(len(s.response_ids) % 2) for s in samples]


def collector(engine, stream, tokenizer, reward_function=odd_length, log_passrate=False, seed=42, **options):
    options = {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "rollout_max_response_len": 8} | options
    return built(engine, stream, tokenizer, reward_function, options, RewardArguments(log_passrate=log_passrate), seed)


def built(engine, stream, tokenizer, reward_function, options, reward, seed=42):
    drops = reward.on_error == "drop"
    tools = GroupTools(engine, tokenizer, generate_group, reward_function, reward.reward_error_value, drops)
    flags = fill_over_sampling(RolloutArguments(**options))
    settings = Settings(rollout=flags, reward=reward, data=DataArguments(rollout_seed=seed))
    group_collector = build_collector(settings, stream, tools, num_iterations=100)
    assert isinstance(group_collector, BurstCollector)
    return group_collector


async def collect(*args, **options):
    return await collector(*args, **options).collect(0)


async def test_without_a_filter_one_burst_is_the_iteration(scripted_engine, counting_stream, tokenizer):
    stream, engine = counting_stream(100), scripted_engine(delays=(5, 0, 2))
    collected = await collect(engine, stream, tokenizer)
    assert [g.group_index for g in collected.groups] == [0, 1, 2, 3]
    assert stream.drawn == len(engine.requests) == 4
    assert engine.finished != [r.prompt_ids for r in engine.requests]  # they did finish out of order
    assert all(s.reward is not None for g in collected.groups for s in g.samples)
    assert not any("dropped" in name or "surplus" in name for name in collected.metrics)


async def test_an_iteration_in_progress_says_how_many_groups_are_ready(scripted_engine, counting_stream, tokenizer):
    seen = []

    async def reward(samples):
        seen.append(group_collector.progress)
        return [0.0] * len(samples)

    group_collector = collector(scripted_engine(), counting_stream(100), tokenizer, reward)
    assert group_collector.progress == (0, 4)
    await group_collector.collect(0)
    assert seen[0] == (0, 4) and group_collector.progress == (4, 4)
    await group_collector.collect(1)
    assert seen[4] == (0, 4), "each iteration starts at 0"


@pytest.mark.parametrize("path", [None, NONZERO_STD])
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.sampled_from([4, 6, 9]))
def test_the_order_of_completion_changes_nothing(scripted_engine, counting_stream, tokenizer, path, delays, burst):
    options = {"dynamic_sampling_filter_path": path, "over_sampling_batch_size": burst if path else None}
    slow = asyncio.run(collect(scripted_engine(delays), counting_stream(50), tokenizer, **options))
    straight = asyncio.run(collect(scripted_engine(), counting_stream(50), tokenizer, **options))
    assert slow == straight


@given(dropped=st.sets(st.integers(0, 30)), burst=st.integers(4, 9))
def test_the_first_groups_that_pass_are_the_iteration(scripted_engine, counting_stream, tokenizer, dropped, burst):
    def mine(group):
        return FilterDecision(group.group_index not in dropped, "odd" if group.group_index % 2 else "even")

    stream = counting_stream(1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "mine", mine, raising=False)
        options = {"dynamic_sampling_filter_path": MINE, "over_sampling_batch_size": burst}
        collected = asyncio.run(collect(scripted_engine(), stream, tokenizer, **options))
    drawn = range(stream.drawn)
    passed = [i for i in drawn if i not in dropped]
    assert [g.group_index for g in collected.groups] == passed[:4]
    assert stream.drawn % burst == 0
    assert len([i for i in passed if i < stream.drawn - burst]) < 4  # no burst more than it took
    values = {name: metric.value for name, metric in collected.metrics.items()}
    assert values["rollout/surplus_groups"] == len(passed) - 4
    for reason, parity in (("even", 0), ("odd", 1)):
        expected = len([i for i in drawn if i in dropped and i % 2 == parity])
        assert values.get(f"rollout/dropped/{reason}", 0) == expected


@pytest.mark.parametrize(("prompts", "bursts"), [(4, MIN_STALLED_BURSTS), (100, 50), (10**6, MAX_STALLED_BURSTS)])
async def test_a_filter_that_drops_everything_stops_the_run(
    scripted_engine, counting_stream, tokenizer, prompts, bursts
):
    async def never(samples):
        return [0.0 for _ in samples]

    stream = counting_stream(prompts)
    fault = (
        rf"--dynamic-sampling-filter-path {NONZERO_STD}: iteration 0 has 0 of 4 groups.*"
        rf"last {bursts} bursts.*{4 * bursts} zero_std"
    )
    with pytest.raises(ValueError, match=fault):
        await collect(scripted_engine(), stream, tokenizer, never, dynamic_sampling_filter_path=NONZERO_STD)
    assert stream.drawn == 4 * bursts


async def test_metrics_of_kept_and_of_all_generated_groups(scripted_engine, counting_stream, tokenizer):
    async def by_prompt(samples):  # prompts 0 and 2 are always solved, the others by their first sample only
        return [float(s.prompt.label % 2 == 0 or s.trajectory_id % 4 == 0) for s in samples]

    engine = scripted_engine(finish=lambda seed: "length")
    options = {"rollout_batch_size": 2, "over_sampling_batch_size": 4, "dynamic_sampling_filter_path": NONZERO_STD}
    collected = await collect(engine, counting_stream(100), tokenizer, by_prompt, log_passrate=True, **options)
    values = {name.removeprefix("rollout/"): metric.value for name, metric in collected.metrics.items()}
    assert [g.group_index for g in collected.groups] == [1, 3]
    assert values["reward"] == 0.25
    assert values["reward_std"] == pytest.approx(0.5)
    assert values["prompt_length"] == (2 + 4) / 2
    assert (values["truncated_fraction"], values["aborted_fraction"]) == (1.0, 0.0)
    assert (values["zero_std_groups"], values["dropped/zero_std"]) == (0.5, 2)
    assert [values[f"pass@{k}"] for k in (1, 2, 4)] == pytest.approx([0.625, 0.75, 1.0])
    assert values["tokens"] == sum(min(1 + seed % 5, 8) for r in engine.requests for seed in r.seeds)
    assert values["reward_errors"] == 0


async def test_the_seed_alone_decides_the_responses(scripted_engine, counting_stream, tokenizer):
    runs = [await collect(scripted_engine(), counting_stream(9), tokenizer, seed=seed) for seed in (1, 1, 2)]
    groups = [collected.groups for collected in runs]
    assert groups[0] == groups[1] != groups[2]


async def test_a_failure_is_raised_unchanged_and_leaves_no_task_behind(counting_stream, tokenizer):
    class Failing:
        async def generate(self, request):
            if len(request.prompt_ids) == 2:
                raise ValueError("token id 99 is outside the vocabulary")
            await asyncio.get_running_loop().create_future()  # never answered

    with pytest.raises(ValueError, match="token id 99"):
        await collect(Failing(), counting_stream(9), tokenizer)
    assert len(asyncio.all_tasks()) == 1


async def test_a_cancellation_that_nobody_asked_for_is_a_failure(scripted_engine, counting_stream, tokenizer):
    async def cancels(samples):
        raise asyncio.CancelledError

    with pytest.raises(UserCodeError, match=r"^the code that makes group \d raised CancelledError$"):
        await collect(scripted_engine(), counting_stream(9), tokenizer, cancels)
    assert len(asyncio.all_tasks()) == 1


async def test_a_hard_stretch_between_kept_groups_does_not_stop_the_run(scripted_engine, counting_stream, tokenizer):
    hard = MIN_STALLED_BURSTS - 1  # bursts between two that bring one group each; the set of 4 prompts is passed often

    async def now_and_then(samples):
        easy = samples[0].group_index % (4 * (hard + 1)) == 0
        return [float(easy and i == 0) for i, _ in enumerate(samples)]

    stream = counting_stream(4)
    options = {"dynamic_sampling_filter_path": NONZERO_STD}
    collected = await collect(scripted_engine(), stream, tokenizer, now_and_then, **options)
    assert [g.group_index for g in collected.groups] == [4 * (hard + 1) * i for i in range(4)]


async def test_iterations_end_when_every_prompt_is_mastered(scripted_engine, tokenizer):
    async def right(samples):
        return [1.0 for _ in samples]

    stream = PromptStream([Prompt(str(i), (1 + i,)) for i in range(6)], shuffle=False, seed=0)
    mastering = collector(scripted_engine(), stream, tokenizer, right, max_prompt_pass_rate=0.9)
    assert [group.group_index for group in (await mastering.collect(0)).groups] == [0, 1, 2, 3]
    assert {group.prompt.text for group in (await mastering.collect(1)).groups} == {"4", "5"}
    with pytest.raises(NoPromptsLeft):
        await mastering.collect(2)


async def test_a_burst_of_what_is_left_can_fill_an_iteration(scripted_engine, tokenizer):
    async def useful(samples):
        return [float(i == 0) for i, _ in enumerate(samples)]

    stream = PromptStream([Prompt(str(i), (1 + i,)) for i in range(5)], shuffle=False, seed=0)
    for group in stream.draw(5):
        stream.leave_out(group.group_index)
    stream.restore(stream.state(unfinished=range(5)))
    options = {"over_sampling_batch_size": 8, "dynamic_sampling_filter_path": NONZERO_STD}
    group_collector = collector(scripted_engine(), stream, tokenizer, useful, **options)
    assert [group.group_index for group in (await group_collector.collect(0)).groups] == [0, 1, 2, 3]
    with pytest.raises(NoPromptsLeft):
        await group_collector.collect(1)


async def test_the_context_limit_reaches_the_engine(scripted_engine, counting_stream, tokenizer):
    engine = scripted_engine()
    await collect(engine, counting_stream(9), tokenizer, rollout_max_context_len=6)
    assert [r.sampling.max_new_tokens for r in engine.requests] == [5, 4, 3, 2]


async def test_reward_errors_are_counted_if_a_value_replaces_them(scripted_engine, counting_stream, tokenizer):
    async def fails_on_prompt_1(samples):
        if any(s.prompt.label == 1 for s in samples):
            raise RuntimeError("no answer found")
        return [1.0 for _ in samples]

    options = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "rollout_max_response_len": 8}
    reward = RewardArguments(reward_error_value=-1.0)
    collecting = built(scripted_engine(), counting_stream(9), tokenizer, fails_on_prompt_1, options, reward)
    collected = await collecting.collect(0)
    assert [g.rewards for g in collected.groups] == [[1.0, 1.0], [-1.0, -1.0], [1.0, 1.0], [1.0, 1.0]]
    assert collected.metrics["rollout/reward_errors"].value == 2


async def fails_on_some(samples):
    """Fail on the first response to each prompt, and on all responses to prompt 1."""
    if any(s.prompt.label == 1 or s.trajectory_id % 3 == 0 for s in samples):
        raise RuntimeError("no answer found")
    return [float(s.trajectory_id) for s in samples]


async def test_trajectories_are_dropped_and_a_prompt_without_any_is_replaced(
    scripted_engine, counting_stream, tokenizer
):
    options = {"rollout_batch_size": 4, "n_samples_per_prompt": 3, "rollout_max_response_len": 8}
    reward = RewardArguments(reward_error="drop")
    collecting = built(scripted_engine(), counting_stream(20), tokenizer, fails_on_some, options, reward)
    collected = await collecting.collect(0)
    assert [g.group_index for g in collected.groups] == [0, 2, 3, 4], "the fifth prompt replaces the second"
    for group in collected.groups:
        first = 3 * group.group_index
        assert [s.trajectory_id for s in group.samples] == [first + 1, first + 2]
        assert group.rewards == [first + 1.0, first + 2.0]
        assert group.dropped_trajectories == 1
    values = {name: metric.value for name, metric in collected.metrics.items()}
    assert values["rollout/dropped_trajectories"] == 4
    assert values["rollout/dropped/reward_error"] == 1
    assert values["rollout/reward"] == sum(sum(g.rewards) for g in collected.groups) / 8


async def test_a_reward_that_always_fails_stops_the_run_under_drop(scripted_engine, counting_stream, tokenizer):
    async def fails(samples):
        raise RuntimeError("no answer found")

    options = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 8}
    reward = RewardArguments(reward_error="drop")
    collecting = built(scripted_engine(), counting_stream(3), tokenizer, fails, options, reward)
    with pytest.raises(ValueError, match="--reward-error drop: iteration 0 has 0 of 2 groups.* reward_error"):
        await collecting.collect(0)


async def test_a_trajectory_in_several_samples_is_dropped_as_a_whole():
    prompt = Prompt("2*3=", (1, 2, 3))
    parts = [Sample(prompt, 0, trajectory, [6], response=text) for trajectory, text in ((0, "a"), (0, "bad"), (1, "c"))]

    async def generated(group, *_, **__):
        return PromptGroup(0, prompt, list(parts))

    async def fails_on_bad(samples):
        if any(s.response == "bad" for s in samples):
            raise RuntimeError("bad")
        return [1.0 for _ in samples]

    tools = GroupTools(None, None, generated, fails_on_bad, None, drops_reward_errors=True)
    spec = GroupSpec(SamplingParams(4), 2, lambda *_: 0)
    produced = await produce_group(PromptGroup(0, prompt), tools, spec)
    assert [s.response for s in produced.group.samples] == ["c"]
    assert (produced.group.dropped_trajectories, produced.reward_errors, produced.drop_reason) == (1, 1, None)


async def prompts_left_out(rewards, rate, drop_reason):
    samples = [Sample(Prompt("p", (1,)), 7, k, reward=reward) for k, reward in enumerate(rewards)]

    async def produce(drawn):
        return ProducedGroup(PromptGroup(7, drawn.prompt, samples), drop_reason=drop_reason)

    left_out: list[int] = []
    stream = SimpleNamespace(leave_out=left_out.append)
    await leaving_out_mastered(produce, stream, rate)(PromptGroup(7, Prompt("p", (1,))))
    return left_out


@pytest.mark.parametrize("percent", range(5, 101, 5))
async def test_a_prompt_is_left_out_at_exactly_the_rate_whatever_the_filter_decides(percent):
    passing = percent // 5
    for passed, left_out in ((passing - 1, []), (passing, [7])):
        rewards = [float(k < passed) for k in range(20)]
        assert await prompts_left_out(rewards, percent / 100, drop_reason="zero_std") == left_out


async def test_a_group_that_lacks_rewards_leaves_no_prompt_out():
    assert await prompts_left_out([], 0.5, drop_reason="reward_error") == []
