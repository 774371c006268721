"""The share of the time with requests, and the mean number of responses in flight, by a clock that the test moves."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from miles.engine.base import GenerationRequest, SamplingParams
from miles.rollout.producer import MeteredEngine
from miles.types.metrics import values


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Held:
    """Holds each request until the test answers it or lets it fail."""

    def __init__(self):
        self._requests = []

    async def generate(self, request):
        self._requests.append(asyncio.get_running_loop().create_future())
        return await self._requests[-1]

    def answer(self, result):
        self._requests.pop().set_result(result)

    def fail(self, error):
        self._requests.pop().set_exception(error)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def held():
    return Held()


@pytest.fixture
def engine(held, clock):
    return MeteredEngine(held, clock)


@pytest.fixture
def in_flight(held, engine):
    @asynccontextmanager
    async def request(responses):
        """Have a request for so many responses in flight during the block."""
        seeds = tuple(range(responses))
        answer = asyncio.create_task(engine.generate(GenerationRequest((1,), seeds, SamplingParams(4))))
        await asyncio.sleep(0)
        yield
        held.answer("answers")
        assert await answer == "answers"

    return request


async def test_nothing_is_measured_before_the_first_request(clock, engine, in_flight):
    clock.now += 50  # while the trainer starts
    assert engine.metrics() == {}
    async with in_flight(2):
        clock.now += 3
    assert values(engine.metrics()) == {"perf/engine_busy": 1.0, "perf/engine_responses": 2.0}


async def test_time_without_requests_counts_from_one_reading_to_the_next(clock, engine, in_flight):
    async with in_flight(1):
        clock.now += 1
    engine.metrics()
    clock.now += 6  # a step
    async with in_flight(4):
        clock.now += 1
        async with in_flight(2):
            clock.now += 2
    clock.now += 1
    mean = pytest.approx((4 + 2 * 6) / 3)
    assert values(engine.metrics()) == {"perf/engine_busy": 0.3, "perf/engine_responses": mean}
    clock.now += 5
    assert values(engine.metrics()) == {"perf/engine_busy": 0.0}  # no mean of responses in no time


async def test_a_response_that_crosses_a_reading_counts_in_both(clock, engine, in_flight):
    async with in_flight(1):
        clock.now += 2
        first = engine.metrics()
        clock.now += 3
    clock.now += 1
    assert values(first)["perf/engine_busy"] == 1.0
    assert values(engine.metrics())["perf/engine_busy"] == 0.75


@pytest.mark.parametrize("end", ["refused", "cancelled"])
async def test_a_request_that_fails_is_not_in_flight(clock, held, engine, end):
    request = asyncio.create_task(engine.generate(GenerationRequest((1,), (7,), SamplingParams(4))))
    await asyncio.sleep(0)
    clock.now += 1
    if end == "cancelled":
        request.cancel()
    else:
        held.fail(ValueError("refused"))
    await asyncio.gather(request, return_exceptions=True)
    engine.metrics()
    clock.now += 1
    assert values(engine.metrics()) == {"perf/engine_busy": 0.0}
