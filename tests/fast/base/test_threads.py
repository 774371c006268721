"""Calls in daemon threads: their outcomes arrive, and threads are used again."""

import asyncio
import threading

import pytest

from miles.base.threads import in_thread


@pytest.mark.parametrize("error", [KeyError("missing"), ValueError("odd")])
async def test_an_error_arrives_as_it_is(error):
    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        await asyncio.wait_for(in_thread(fail), 60)
    assert caught.value is error


async def test_the_end_of_an_iterator_does_not_hang():
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(in_thread(next, iter([])), 60)


async def test_a_call_that_is_given_up_keeps_its_thread_until_it_returns():
    begun, end = threading.Event(), threading.Event()
    idents = []

    def hang():
        idents.append(threading.get_ident())
        begun.set()
        end.wait()

    hanging = asyncio.ensure_future(in_thread(hang))
    assert await asyncio.wait_for(in_thread(begun.wait, 60), 90)
    hanging.cancel()
    try:
        assert await asyncio.wait_for(in_thread(threading.get_ident), 60) not in idents
    finally:
        end.set()


async def test_calls_one_after_the_other_take_few_threads():
    assert len({await in_thread(threading.get_ident) for _ in range(50)}) < 10
