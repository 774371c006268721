"""The rollout side's answers to the main loop, without Ray."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

from miles.cluster.rollout_actor import RolloutActor, RolloutDriver
from miles.data.stream import NoPromptsLeft
from miles.rollout.ordering import Start


async def test_without_prompts_there_is_no_iteration_and_that_is_no_failure():
    @asynccontextmanager
    async def collecting(start):
        raise NoPromptsLeft
        yield

    actor = object.__new__(RolloutActor)
    actor._settings = SimpleNamespace(dims=SimpleNamespace(token_ranks=2))
    actor._built = SimpleNamespace(collecting=collecting)
    answer = await actor.generate(Start(3, 2, 3))
    assert answer == (None, [], [])

    driver = object.__new__(RolloutDriver)
    driver._planner = SimpleNamespace(start_until=lambda iteration: [])
    driver._started = {3: answer}
    driver._replaces = driver._dead = False
    driver._result = lambda call: call
    assert driver.generate(3) is None
