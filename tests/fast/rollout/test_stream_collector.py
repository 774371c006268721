"""Every prompt drawn is trained on, dropped and counted, or named in the state: whatever finishes first."""

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.arguments.reward import RewardArguments
from miles.arguments.rollout import RolloutArguments
from miles.data.stream import PromptStream
from miles.engine.base import Generation
from miles.rollout.generate import generate_group
from miles.rollout.off_policy import staleness_metrics
from miles.rollout.source import build_source
from miles.rollout.stream_collector import StreamCollector
from miles.sample import Prompt

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
    source = build_source(stream, engine, tokenizer, reward, rollout, RewardArguments(), 1, generate_group, total)
    assert isinstance(source, StreamCollector)
    return source


def stream_of(size):
    return PromptStream([Prompt(str(i), (1 + i,), source=f"set:{i}") for i in range(size)], True, 3)


def count(rollout, name):
    return rollout.metrics[name].value if name in rollout.metrics else 0


async def rollouts(source, engine, length, first=0):
    for iteration in range(first, first + length):
        engine.version = iteration
        source.weights_arrived(iteration)
        rollout = await source.collect(iteration)
        yield replace(rollout, metrics=rollout.metrics | staleness_metrics(rollout.groups, iteration))


def run(seed, mode, tokenizer, length=6, reward=by_group, size=7, **more):
    async def scenario():
        engine, stream = SlowEngine(random.Random(seed)), stream_of(size)
        source = make(engine, tokenizer, stream, reward, **MODES[mode], **more)
        found = [rollout async for rollout in rollouts(source, engine, length)]
        end = source.state()
        await source._cancel()
        return found, engine, end

    return asyncio.run(scenario())


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_prompt_is_lost_or_taken_twice(tokenizer, mode, seed):
    found, engine, state = run(seed, mode, tokenizer)
    taken = [group.group_index for rollout in found for group in rollout.groups]
    assert [len(rollout.groups) for rollout in found] == [BATCH] * 6
    assert len(set(taken)) == len(taken)
    drawn, unfinished = state["next_group_index"], state["unfinished"]
    values = [{name: m.value for name, m in rollout.metrics.items()} for rollout in found]
    given_up = 0.0
    if mode == "early stop":
        given_up = sum(v["rollout/unfinished_groups"] + v["rollout/surplus_groups"] for v in values)
        assert unfinished == []
    stale = sum(count(rollout, "rollout/dropped/stale") for rollout in found)
    assert not set(taken) & set(unfinished)
    assert len(taken) + len(unfinished) + given_up + stale == drawn
    if mode != "fully async":
        assert engine.most_in_flight <= 5
    assert all(s.reward is not None for rollout in found for group in rollout.groups for s in group.samples)


@pytest.mark.parametrize("mode", ["partial", "fully async"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), stop=st.integers(0, 5))
def test_a_resumed_run_draws_what_was_not_trained_on(tokenizer, mode, seed, stop):
    async def scenario():
        engine, stream = SlowEngine(random.Random(seed)), stream_of(7)
        source = make(engine, tokenizer, stream, **MODES[mode])
        taken, dropped, state = [], 0, source.state()
        async for rollout in rollouts(source, engine, stop):
            taken += [group.group_index for group in rollout.groups]
            dropped += count(rollout, "rollout/dropped/stale")
            state = source.state()
        await source._cancel()
        resumed = stream_of(7)
        resumed.restore(state)
        source = make(engine, tokenizer, resumed, **MODES[mode])
        async for rollout in rollouts(source, engine, 4, first=stop):
            taken += [group.group_index for group in rollout.groups]
            dropped += count(rollout, "rollout/dropped/stale")
        end = source.state()
        await source._cancel()
        return taken, dropped, end

    taken, dropped, state = asyncio.run(scenario())
    assert len(set(taken)) == len(taken)
    assert not set(taken) & set(state["unfinished"])
    # what a kill interrupts may be dropped for its age before or after it, never both
    assert len(taken) + len(state["unfinished"]) + dropped == state["next_group_index"]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_nothing_staler_than_the_bound_is_trained_on(tokenizer, seed):
    for how in ("drop", "mask"):
        found, *_ = run(seed, "fully async", tokenizer, length=10, stale_samples=how)
        for iteration, rollout in enumerate(found):
            for sample in (s for group in rollout.groups for s in group.samples):
                trained = [v for v, m in zip(sample.weight_versions, sample.loss_mask, strict=True) if m]
                assert all(iteration - 2 <= version <= iteration for version in trained)
            assert rollout.metrics["rollout/staleness_max"].value <= 2
            assert ("rollout/masked_stale_tokens" in rollout.metrics) == (how == "mask")


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), mask=st.booleans())
def test_carried_over_samples_hold_tokens_of_several_versions(tokenizer, seed, mask):
    found, *_ = run(seed, "partial", tokenizer, length=8, mask_offpolicy_in_partial_rollout=mask)
    for iteration, rollout in enumerate(found):
        old = masked = 0
        for sample in (s for group in rollout.groups for s in group.samples):
            sample.check()
            assert len(sample.response_ids) <= 8
            assert sample.weight_versions == sorted(sample.weight_versions)
            old += sum(version < iteration for version in sample.weight_versions)
            masked += sample.loss_mask.count(0)
        assert masked == (old if mask else 0)
        if mask:
            assert rollout.metrics["rollout/masked_stale_tokens"].value == old
            assert rollout.metrics["rollout/staleness"].value in (0, pytest.approx(float("nan"), nan_ok=True))


def test_some_sample_is_carried_over_in_the_middle(tokenizer):
    found, *_ = run(3, "partial", tokenizer, length=20)
    assert any(rollout.metrics["rollout/mixed_version_samples"].value > 0 for rollout in found)


@pytest.mark.parametrize("mode", MODES)
def test_a_filter_is_refilled(tokenizer, mode):
    async def sometimes(samples):
        useful = samples[0].group_index % 3 == 0
        return [float(useful and i == 0) for i, _ in enumerate(samples)]

    path = "miles.rollout.filters:check_reward_nonzero_std"
    found, *_ = run(1, mode, tokenizer, reward=sometimes, dynamic_sampling_filter_path=path)
    assert all(group.group_index % 3 == 0 for rollout in found for group in rollout.groups)
    assert sum(rollout.metrics["rollout/dropped/zero_std"].value for rollout in found) > 10


def test_a_filter_that_drops_everything_stops_the_run(tokenizer):
    async def never(samples):
        return [0.0 for _ in samples]

    path = "miles.rollout.filters:check_reward_nonzero_std"
    with pytest.raises(ValueError, match="brought none"):
        run(1, "fully async", tokenizer, reward=never, dynamic_sampling_filter_path=path)


@pytest.mark.parametrize("mode", MODES)
def test_a_failure_is_told_and_leaves_no_task_behind(tokenizer, mode):
    async def fails(samples):
        raise KeyError("gold")

    async def scenario():
        source = make(SlowEngine(random.Random(1)), tokenizer, stream_of(9), fails, **MODES[mode])
        with pytest.raises(Exception, match="gold"):
            await source.collect(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(scenario()) == 1


def test_nothing_is_started_for_rollouts_that_will_not_come(tokenizer):
    async def scenario():
        engine, stream = SlowEngine(random.Random(1)), stream_of(50)
        source = make(engine, tokenizer, stream, total=4, **MODES["fully async"])
        dropped = 0
        async for rollout in rollouts(source, engine, 4):
            dropped += sum(m.value for name, m in rollout.metrics.items() if "dropped" in name)
        return stream.state()["next_group_index"] - dropped

    assert asyncio.run(scenario()) == 4 * BATCH
