"""The rollout side's answers to the main loop, without Ray."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

from miles.cluster.rollout_actor import RolloutActor, RolloutDriver
from miles.data.stream import NoPromptsLeft
from miles.parallel.dims import ParallelDims
from miles.rollout.ordering import Start
from miles.rollout.pipeline import IterationSummary


async def test_without_prompts_there_is_no_iteration_and_that_is_no_failure():
    @asynccontextmanager
    async def collecting(start):
        raise NoPromptsLeft
        yield

    actor = object.__new__(RolloutActor)
    actor._settings = SimpleNamespace(dims=ParallelDims(2))
    actor._built = SimpleNamespace(collecting=collecting)
    answer = await actor.generate(Start(3, 2, 3))
    assert answer == (None, [], [])

    driver = object.__new__(RolloutDriver)
    driver._planner = SimpleNamespace(start_until=lambda iteration: [])
    driver._started = {3: answer}
    driver._replaces = driver._dead = False
    driver._result = lambda call: call
    assert driver.generate(3) is None


async def test_ranks_that_share_their_sequences_get_one_object():
    settings = SimpleNamespace(dims=ParallelDims(4, context_parallel_size=2))
    summary = IterationSummary({}, [], {"position": 7})

    @asynccontextmanager
    async def collecting(start):
        yield SimpleNamespace(scored=SimpleNamespace(groups=[]), summary=lambda records: summary)

    actor = object.__new__(RolloutActor)
    actor._settings = settings
    actor._built = SimpleNamespace(collecting=collecting)
    actor._convert = lambda iteration, groups: (["first", "first", "second", "second"], [])
    answer = await actor.generate(Start(3, 2, 3))
    assert answer == (summary, "first", "second"), "as many objects as there are replicas"

    driver = object.__new__(RolloutDriver)
    driver.settings = settings
    driver._planner = SimpleNamespace(start_until=lambda iteration: [])
    driver._started = {3: list(answer)}
    driver._replaces = driver._dead = False
    driver._result = lambda call: call
    generated = driver.generate(3)
    assert generated.shards_by_rank == ["first", "first", "second", "second"]
    assert driver._position == {"position": 7}
