"""Which weights generate which iteration, whatever the timing."""

import asyncio
import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from miles.config.rollout import RolloutArguments
from miles.rollout.ordering import (
    IterationPlanner,
    LeftoverGroups,
    OrderingRule,
    Overlap,
    RolloutGate,
    StaleTokens,
    Start,
)

ITERATIONS = 6


def rule(**flags):
    return OrderingRule.from_flags(RolloutArguments(rollout_batch_size=4, **flags))


def calls_of_the_launcher(ordering, first_version):
    """The starts and the weight updates (version, after) of a run, as the main loop causes them."""
    planner = IterationPlanner(ordering, ITERATIONS)
    starts, updates = [], [(first_version, planner.load_weights(first_version))]
    for iteration in range(first_version, ITERATIONS):
        starts += planner.start_until(iteration)
        updates.append((iteration + 1, planner.load_weights(iteration + 1)))  # trained on it
    return starts, updates


async def versions_by_iteration(ordering, seed, first_version):
    """The versions before and after each iteration was generated; calls arrive in any order and at any pace."""
    rng = random.Random(seed)
    starts, updates = calls_of_the_launcher(ordering, first_version)

    async def turns():
        for _ in range(rng.randint(0, 5)):
            await asyncio.sleep(0)

    gate, version, seen = RolloutGate(), -1, {}

    async def update(new, after):
        nonlocal version
        await turns()
        async with gate.loading(new, after):
            await turns()
            version = new

    async def generate(start):
        await turns()
        async with gate.collecting(start):
            seen[start.iteration] = [version]
            await turns()
            seen[start.iteration].append(version)

    calls = [update(*call) for call in updates] + [generate(start) for start in starts]
    rng.shuffle(calls)
    async with asyncio.timeout(60):  # a wrong rule may wait forever
        await asyncio.gather(*calls)
    return seen


@settings(max_examples=50, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(ahead=st.integers(0, 3), seed=st.integers(0, 10**6), first=st.integers(0, 3))
def test_iteration_r_is_generated_by_version_r_minus_k(ahead, seed, first):
    expected = {r: [max(first, r - ahead)] * 2 for r in range(first, ITERATIONS)}
    assert asyncio.run(versions_by_iteration(rule(async_steps=ahead), seed, first)) == expected


def test_the_launcher_starts_k_iterations_ahead_and_none_after_the_last():
    planner = IterationPlanner(rule(async_steps=1), num_iterations=3)
    assert planner.awaits_loading and planner.load_weights(0) is None
    assert planner.start_until(0) == [Start(0, None, 0), Start(1, 0, 0)]
    assert not planner.awaits_loading and planner.load_weights(1) == 1
    assert planner.start_until(1) == [Start(2, 1, 1)]
    assert planner.load_weights(2) == 2
    assert planner.start_until(2) == []


def test_synchronous_generation_waits_for_every_update():
    planner = IterationPlanner(rule(), num_iterations=3)
    for iteration in range(3):
        assert planner.awaits_loading
        after = planner.load_weights(iteration)
        assert after == (iteration - 1 if iteration else None)
        assert planner.start_until(iteration) == [Start(iteration, after, iteration)]


def test_samples_that_are_read_are_read_one_iteration_ahead_and_are_never_stale():
    reading = OrderingRule.from_flags(RolloutArguments(rollout_batch_size=4), reads_samples=True)
    planner = IterationPlanner(reading, num_iterations=3)
    planner.load_weights(0)
    assert [planner.start_until(i) for i in range(3)] == [[Start(0, None, 0), Start(1, 0, 0)], [Start(2, 1, 1)], []]
    assert not planner.awaits_loading and not reading.generates_stale_tokens


def test_fully_async_loads_weights_at_once_and_bounds_their_age():
    planner = IterationPlanner(rule(async_steps=2, fully_async=True), num_iterations=9)
    assert [planner.start_until(i) for i in range(4)] == [
        [Start(0, None, 0)],
        [Start(1, 0, 0)],
        [Start(2, 1, 0)],
        [Start(3, 2, 1)],
    ]
    assert planner.load_weights(4) is None and not planner.awaits_loading


def test_a_resumed_or_replaced_process_starts_with_the_newest_weights():
    planner = IterationPlanner(rule(async_steps=2), num_iterations=9)
    assert planner.load_weights(5) is None
    assert planner.start_until(5) == [Start(5, None, 5), Start(6, 5, 5), Start(7, 6, 5)]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (Overlap.SYNCHRONOUS, 0, LeftoverGroups.AWAIT, StaleTokens.KEEP, 4)),
        ({"over_sampling_batch_size": 6}, (Overlap.SYNCHRONOUS, 0, LeftoverGroups.AWAIT, StaleTokens.KEEP, 4)),
        (
            {"over_sampling_batch_size": 6, "dynamic_sampling_filter_path": "a:b"},
            (Overlap.SYNCHRONOUS, 0, LeftoverGroups.AWAIT, StaleTokens.KEEP, 6),
        ),
        ({"async_steps": 2}, (Overlap.AHEAD, 2, LeftoverGroups.AWAIT, StaleTokens.KEEP, 4)),
        (
            {"over_sampling_early_stop": True, "over_sampling_batch_size": 6, "async_steps": 1},
            (Overlap.AHEAD, 1, LeftoverGroups.CANCEL, StaleTokens.KEEP, 6),
        ),
        (
            {"partial_rollout": True, "over_sampling_batch_size": 6},
            (Overlap.SYNCHRONOUS, 0, LeftoverGroups.INTERRUPT, StaleTokens.KEEP, 6),
        ),
        (
            {"partial_rollout": True, "over_sampling_batch_size": 6, "mask_offpolicy_in_partial_rollout": True},
            (Overlap.SYNCHRONOUS, 0, LeftoverGroups.INTERRUPT, StaleTokens.MASK, 6),
        ),
        (
            {"fully_async": True, "async_steps": 2},
            (Overlap.FULLY_ASYNC, 2, LeftoverGroups.CONTINUE, StaleTokens.DROP, 12),
        ),
        (
            {"fully_async": True, "async_steps": 1, "stale_samples": "mask"},
            (Overlap.FULLY_ASYNC, 1, LeftoverGroups.CONTINUE, StaleTokens.MASK, 8),
        ),
    ],
)
def test_flags_choose_one_state_per_question(flags, expected):
    assert rule(**flags) == OrderingRule(*expected)


async def test_evaluation_excludes_collecting():
    gate, inside = RolloutGate(), []
    async with gate.loading(0, None):
        pass

    async def block(context, name):
        async with context:
            assert not inside
            inside.append(name)
            for _ in range(3):
                await asyncio.sleep(0)
            inside.remove(name)

    await asyncio.gather(
        block(gate.collecting(Start(0, None, 0)), "iteration"),
        block(gate.evaluating(), "eval"),
        block(gate.evaluating(), "again"),
    )


async def test_after_a_failed_iteration_weights_can_still_be_loaded():
    gate = RolloutGate()
    async with gate.loading(0, None):
        pass
    with pytest.raises(KeyError):
        async with gate.collecting(Start(0, None, 0)):
            raise KeyError("gold")
    async with gate.loading(1, after=0):
        pass


async def test_weights_that_failed_to_load_start_nothing():
    gate = RolloutGate()
    with pytest.raises(KeyError):
        async with gate.loading(0, None):
            raise KeyError("gold")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), gate.collecting(Start(0, None, 0)):
            raise AssertionError("it has no weights")
