"""Every prompt drawn is trained on, dropped and counted, or named in the state: whatever finishes first."""

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.base.user_code import UserCodeError
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.engine.base import Generation
from miles.rollout.groups import GroupTools, generate_group
from miles.rollout.metrics import staleness_metrics
from miles.rollout.pipeline import build_collector
from miles.rollout.stream_collector import StreamCollector
from miles.tasks.data.stream import NoPromptsLeft, PromptStream
from miles.types.sample import Prompt

BATCH, SAMPLES = 3, 2
MODES = {
    "early stop": {"over_sampling_early_stop": True, "over_sampling_batch_size": 5},
    "partial": {"partial_rollout": True, "over_sampling_batch_size": 5},
    "fully async": {"fully_async": True, "async_steps": 2},
}


class SlowEngine:
    """Each response takes a number of turns of the event loop drawn from ``rng``; weights may change, and it aborts."""

    def __init__(self, rng):
        self.rng = rng
        self.version = 0
        self.epoch = 0  # of aborts
        self.in_flight = 0
        self.most_in_flight = 0

    async def generate(self, request):
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return [await self._answer(request, seed) for seed in request.seeds]
        finally:
            self.in_flight -= 1

    async def _answer(self, request, seed):
        epoch, versions = self.epoch, []
        for _ in range(min(self.rng.randint(1, 6), request.sampling.max_new_tokens)):
            await asyncio.sleep(0)
            if self.epoch != epoch:
                return generation(versions, "abort", self.version)
            versions.append(self.version)
        return generation(versions, "stop", self.version)

    async def abort(self):
        self.epoch += 1
        while self.in_flight:
            await asyncio.sleep(0)


def generation(versions, reason, now):
    last = versions[-1] if versions else now
    runs = [(v, versions.count(v)) for v in sorted(set(versions)) if v != last]
    return Generation([5] * len(versions), [-0.5] * len(versions), reason, last, tuple(runs))


async def by_group(samples):
    return [float(s.trajectory_id % SAMPLES) for s in samples]


def make(engine, tokenizer, stream, reward=by_group, total=100, **options):
    rollout = RolloutArguments(
        rollout_batch_size=BATCH, n_samples_per_prompt=SAMPLES, rollout_max_response_len=8, **options
    )
    tools = GroupTools(engine, tokenizer, generate_group, reward)
    collector = build_collector(Settings(rollout=rollout), stream, tools, num_iterations=total)
    assert isinstance(collector, StreamCollector)
    return collector


def stream_of(size):
    return PromptStream([Prompt(str(i), (1 + i,), source=f"set:{i}") for i in range(size)], True, 3)


def count(scored, name):
    return scored.metrics[name].value if name in scored.metrics else 0


async def iterations(collector, engine, length, first=0):
    for iteration in range(first, first + length):
        engine.version = iteration
        collector.weights_changed(iteration)
        scored = await collector.collect(iteration)
        yield replace(scored, metrics=scored.metrics | staleness_metrics(scored.groups, iteration))


async def collected(seed, mode, tokenizer, length=6, reward=by_group, size=7, **more):
    engine, stream = SlowEngine(random.Random(seed)), stream_of(size)
    collector = make(engine, tokenizer, stream, reward, **MODES[mode], **more)
    results = [scored async for scored in iterations(collector, engine, length)]
    end = collector.state()
    await collector._cancel()
    return results, engine, end


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_no_prompt_is_lost_or_trained_on_twice(tokenizer, mode, seed):
    results, engine, state = asyncio.run(collected(seed, mode, tokenizer))
    taken = [group.group_index for scored in results for group in scored.groups]
    assert [len(scored.groups) for scored in results] == [BATCH] * 6
    assert len(set(taken)) == len(taken)
    drawn, unfinished = state["next_group_index"], state["unfinished"]
    values = [{name: m.value for name, m in scored.metrics.items()} for scored in results]
    given_up = 0.0
    if mode == "early stop":
        given_up = sum(v["rollout/unfinished_groups"] + v["rollout/surplus_groups"] for v in values)
        assert unfinished == []
    stale = sum(count(scored, "rollout/dropped/stale") for scored in results)
    assert not set(taken) & set(unfinished)
    assert len(taken) + len(unfinished) + given_up + stale == drawn
    if mode != "fully async":
        assert engine.most_in_flight <= 5
    assert all(s.reward is not None for scored in results for group in scored.groups for s in group.samples)


@pytest.mark.parametrize("mode", ["partial", "fully async"])
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), stop=st.integers(0, 5))
def test_a_resumed_run_draws_what_was_not_trained_on(tokenizer, mode, seed, stop):
    async def scenario():
        engine, stream = SlowEngine(random.Random(seed)), stream_of(7)
        collector = make(engine, tokenizer, stream, **MODES[mode])
        taken, dropped, state = [], 0, collector.state()
        async for scored in iterations(collector, engine, stop):
            taken += [group.group_index for group in scored.groups]
            dropped += count(scored, "rollout/dropped/stale")
            state = collector.state()
        await collector._cancel()
        resumed = stream_of(7)
        resumed.restore(state)
        collector = make(engine, tokenizer, resumed, **MODES[mode])
        async for scored in iterations(collector, engine, 4, first=stop):
            taken += [group.group_index for group in scored.groups]
            dropped += count(scored, "rollout/dropped/stale")
        end = collector.state()
        await collector._cancel()
        return taken, dropped, end

    taken, dropped, state = asyncio.run(scenario())
    assert len(set(taken)) == len(taken)
    assert not set(taken) & set(state["unfinished"])
    # an interrupted group may be dropped for its age before or after the kill, never both
    assert len(taken) + len(state["unfinished"]) + dropped == state["next_group_index"]


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_nothing_staler_than_the_bound_is_trained_on(tokenizer, seed):
    for how in ("drop", "mask"):
        results, *_ = asyncio.run(collected(seed, "fully async", tokenizer, length=10, stale_samples=how))
        for iteration, scored in enumerate(results):
            for sample in (s for group in scored.groups for s in group.samples):
                trained = [v for v, m in zip(sample.weight_versions, sample.loss_mask, strict=True) if m]
                assert all(iteration - 2 <= version <= iteration for version in trained)
            assert scored.metrics["rollout/staleness_max"].value <= 2
            assert ("rollout/masked_stale_tokens" in scored.metrics) == (how == "mask")


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), mask=st.booleans())
def test_carried_over_samples_hold_tokens_of_several_versions(tokenizer, seed, mask):
    results, *_ = asyncio.run(collected(seed, "partial", tokenizer, length=8, mask_offpolicy_in_partial_rollout=mask))
    for iteration, scored in enumerate(results):
        old = masked = 0
        for sample in (s for group in scored.groups for s in group.samples):
            sample.check()
            assert len(sample.response_ids) <= 8
            assert sample.weight_versions == sorted(sample.weight_versions)
            old += sum(version < iteration for version in sample.weight_versions)
            masked += sample.loss_mask.count(0)
        assert masked == (old if mask else 0)
        if mask:
            assert scored.metrics["rollout/masked_stale_tokens"].value == old
            assert scored.metrics["rollout/staleness"].value in (0, pytest.approx(float("nan"), nan_ok=True))


async def test_some_sample_is_carried_over_in_the_middle(tokenizer):
    runs = [(await collected(seed, "partial", tokenizer, length=20))[0] for seed in range(12)]
    assert any(scored.metrics["rollout/mixed_version_samples"].value > 0 for results in runs for scored in results)


@pytest.mark.parametrize("mode", MODES)
async def test_a_filter_is_refilled(tokenizer, mode):
    async def sometimes(samples):
        useful = samples[0].group_index % 3 == 0
        return [float(useful and i == 0) for i, _ in enumerate(samples)]

    path = "miles.rollout.filters:check_reward_nonzero_std"
    results, *_ = await collected(1, mode, tokenizer, reward=sometimes, dynamic_sampling_filter_path=path)
    assert all(group.group_index % 3 == 0 for scored in results for group in scored.groups)
    assert sum(scored.metrics["rollout/dropped/zero_std"].value for scored in results) > 10


async def test_a_filter_that_drops_everything_stops_the_run(tokenizer):
    async def never(samples):
        return [0.0 for _ in samples]

    path = "miles.rollout.filters:check_reward_nonzero_std"
    with pytest.raises(ValueError, match="kept none of the last"):
        await collected(1, "fully async", tokenizer, reward=never, dynamic_sampling_filter_path=path)


@pytest.mark.parametrize("mode", MODES)
async def test_a_failure_is_raised_and_leaves_no_task_behind(tokenizer, mode):
    async def fails(samples):
        raise KeyError("gold")

    collector = make(SlowEngine(random.Random(1)), tokenizer, stream_of(9), fails, **MODES[mode])
    with pytest.raises(Exception, match="gold"):
        await collector.collect(0)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("mode", MODES)
async def test_a_cancellation_that_nobody_asked_for_is_a_failure(tokenizer, mode):
    """Its group would be lost: it would be in no iteration and in no checkpoint."""
    collector = make(SlowEngine(random.Random(1)), tokenizer, stream_of(9), **MODES[mode])
    produce = collector._produce

    async def cancelled_once(drawn):
        if drawn.group_index == 1:
            raise asyncio.CancelledError
        return await produce(drawn)

    collector._produce = cancelled_once
    with pytest.raises(UserCodeError, match="^the code that makes group 1 raised CancelledError$"):
        await collector.collect(0)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("mode", MODES)
async def test_a_source_that_fails_while_groups_are_replaced_ends_the_iteration(tokenizer, mode):
    async def never(samples):
        return [0.0 for _ in samples]

    class Ends:
        """Has prompts for one draw."""

        epoch = 0

        def __init__(self):
            self.prompts = [stream_of(9)]

        def draw(self, n):
            return self.prompts.pop().draw(n)

    path = "miles.rollout.filters:check_reward_nonzero_std"
    engine = SlowEngine(random.Random(1))
    collector = make(engine, tokenizer, Ends(), never, dynamic_sampling_filter_path=path, **MODES[mode])
    with pytest.raises(IndexError, match="pop from empty list"):
        await asyncio.wait_for(collector.collect(0), 20)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
async def test_iterations_end_when_every_prompt_is_mastered(tokenizer, mode, seed):
    """Half of each group passes, so a prompt is drawn until one of its groups is scored."""
    engine, stream = SlowEngine(random.Random(seed)), stream_of(7)
    collector = make(engine, tokenizer, stream, max_prompt_pass_rate=0.5, **MODES[mode])
    results = []
    with pytest.raises(NoPromptsLeft):
        async for scored in iterations(collector, engine, 9):
            results.append(scored)
    assert results and [len(scored.groups) for scored in results] == [BATCH] * len(results)
    assert not collector._in_flight and engine.in_flight == 0
    collector.weights_changed(9)  # starts nothing, and raises nothing


async def test_a_resumed_run_trains_the_last_groups_when_every_prompt_is_mastered(tokenizer):
    """The groups of three iterations are drawn at once, and the checkpoint lists the groups of two."""
    for resumes in (False, True):
        engine, stream = SlowEngine(random.Random(1)), stream_of(7)
        collector = make(engine, tokenizer, stream, **MODES["fully async"])
        results = [scored async for scored in iterations(collector, engine, 1)]
        for index in range(stream.state()["next_group_index"]):
            stream.leave_out(index)
        if resumes:
            state = collector.state()
            await collector._cancel()
            stream = stream_of(7)
            stream.restore(state)
            collector = make(engine, tokenizer, stream, **MODES["fully async"])
        with pytest.raises(NoPromptsLeft):
            async for scored in iterations(collector, engine, 9, first=1):
                results.append(scored)
        assert sorted(group.group_index for scored in results for group in scored.groups) == list(range(3 * BATCH))


async def test_nothing_is_started_for_iterations_after_the_last(tokenizer):
    engine, stream = SlowEngine(random.Random(1)), stream_of(50)
    collector = make(engine, tokenizer, stream, total=4, **MODES["fully async"])
    dropped = 0
    async for scored in iterations(collector, engine, 4):
        dropped += sum(m.value for name, m in scored.metrics.items() if "dropped" in name)
    assert stream.state()["next_group_index"] - dropped == 4 * BATCH
