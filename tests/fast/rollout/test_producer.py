"""The share of the time with requests, and the mean number of responses in flight, by a clock that the test moves."""

import asyncio

import pytest

from miles.engine.base import GenerationRequest, SamplingParams
from miles.rollout.producer import EngineLoad, MeteredEngine
from miles.types.metrics import values


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_nothing_is_measured_before_the_first_request(clock):
    load = EngineLoad(clock)
    clock.now += 50  # while the trainer starts
    assert load.metrics() == {}
    with load.answering(2):
        clock.now += 3
    assert values(load.metrics()) == {"perf/engine_busy": 1.0, "perf/engine_responses": 2.0}


def test_time_without_requests_counts_from_one_reading_to_the_next(clock):
    load = EngineLoad(clock)
    with load.answering(1):
        clock.now += 1
    load.metrics()
    clock.now += 6  # a step
    with load.answering(4):
        clock.now += 1
        with load.answering(2):
            clock.now += 2
    clock.now += 1
    assert values(load.metrics()) == {"perf/engine_busy": 0.3, "perf/engine_responses": pytest.approx((4 + 2 * 6) / 3)}
    clock.now += 5
    assert values(load.metrics()) == {"perf/engine_busy": 0.0}  # no mean of responses in no time


def test_a_response_that_crosses_a_reading_counts_in_both(clock):
    load = EngineLoad(clock)
    with load.answering(1):
        clock.now += 2
        first = load.metrics()
        clock.now += 3
    clock.now += 1
    assert values(first)["perf/engine_busy"] == 1.0
    assert values(load.metrics())["perf/engine_busy"] == 0.75


async def test_a_request_is_in_flight_until_it_is_answered_or_fails(clock):
    class Engine:
        async def generate(self, request):
            clock.now += 1
            if request.prompt_ids == (0,):
                raise ValueError("refused")
            return [*request.seeds]

    load = EngineLoad(clock)
    engine = MeteredEngine(Engine(), load)
    sampling = SamplingParams(4)
    assert await engine.generate(GenerationRequest((1,), (7, 8), sampling)) == [7, 8]
    with pytest.raises(ValueError, match="refused"):
        await engine.generate(GenerationRequest((0,), (7,), sampling))
    clock.now += 2
    assert values(load.metrics()) == {"perf/engine_busy": 0.5, "perf/engine_responses": 1.5}


async def test_a_cancelled_request_is_not_in_flight(clock):
    class Engine:
        async def generate(self, request):
            await asyncio.Event().wait()

    load = EngineLoad(clock)
    request = asyncio.create_task(
        MeteredEngine(Engine(), load).generate(GenerationRequest((1,), (7,), SamplingParams(4)))
    )
    await asyncio.sleep(0)
    clock.now += 1
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    load.metrics()
    clock.now += 1
    assert values(load.metrics()) == {"perf/engine_busy": 0.0}
