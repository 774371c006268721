"""A reward function cannot stop or hang its caller, whatever it does."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from miles.base import user_code
from miles.base.threads import in_thread
from miles.base.user_code import (
    UserCodeError,
    UserCodeTimeout,
    call_user_code,
    run_blocking,
    user_code_in_thread,
    while_waiting,
)


def call(function, *args, seconds=30.0):
    return asyncio.run(asyncio.wait_for(call_user_code(function, *args, seconds=seconds), timeout=60))


def raising(error):
    def plain():
        raise error

    async def awaited():
        raise error

    return [plain, awaited]


@pytest.mark.parametrize("kind", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize(
    "error", [StopIteration("no number"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()]
)
def test_other_exceptions_become_ordinary_ones(error, kind):
    with pytest.raises((UserCodeError, RuntimeError)) as caught:
        call(raising(error)[kind])
    assert type(error).__name__ in f"{caught.value!r} {caught.value.__cause__!r}"


@pytest.mark.parametrize("run", [user_code_in_thread, run_blocking])
@pytest.mark.parametrize("error", [StopIteration("no number"), SystemExit(3), KeyboardInterrupt(), KeyError("missing")])
async def test_whatever_a_thread_raises_arrives(error, run):
    with pytest.raises(Exception, match="no number|raised SystemExit: 3|raised KeyboardInterrupt|missing") as caught:
        await asyncio.wait_for(run(raising(error)[0]), 60)
    assert error in (caught.value, caught.value.__cause__) and not isinstance(caught.value, StopIteration)


@pytest.mark.parametrize("kind", [0, 1], ids=["sync", "async"])
def test_ordinary_exceptions_arrive_as_they_are(kind):
    with pytest.raises(KeyError, match="missing"):
        call(raising(KeyError("missing"))[kind])


def test_a_timeout_error_raised_by_the_function_is_passed_on():
    with pytest.raises(TimeoutError, match="of the server"):
        call(raising(TimeoutError("of the server"))[0])


released = threading.Event()


async def awaits_for_ever():
    await asyncio.Event().wait()


async def blocks_its_event_loop():
    released.wait()


@pytest.mark.parametrize("function", [released.wait, awaits_for_ever], ids=["sync", "async"])
def test_a_function_that_does_not_return_times_out(function):
    with pytest.raises(UserCodeTimeout, match=r"did not return within 0\.2 s"):
        call(function, seconds=0.2)


def test_a_blocking_call_in_a_coroutine_does_not_block_the_callers_event_loop():
    async def beside():
        blocked = asyncio.create_task(call_user_code(blocks_its_event_loop, seconds=0))
        ticks = 0
        while ticks < 3:
            await asyncio.sleep(0.01)
            ticks += 1
        assert not blocked.done()
        released.set()
        await blocked

    asyncio.run(asyncio.wait_for(beside(), timeout=60))


def test_threads_are_used_again_but_not_one_whose_call_hangs():
    hangs, end = threading.Event(), threading.Event()

    def hang():
        hangs.set()
        end.wait()
        return threading.get_ident()

    async def threads():
        held = asyncio.create_task(call_user_code(hang, seconds=0))
        await asyncio.to_thread(hangs.wait)
        beside = [await call_user_code(threading.get_ident, seconds=0) for _ in range(50)]
        end.set()
        return await held, beside

    held, beside = asyncio.run(threads())
    assert held not in beside
    assert len(set(beside)) < 25, "a call may begin before the thread of the one before is free"


def test_first_calls_at_the_same_time_share_their_event_loop(monkeypatch):
    """A client of a server belongs to one loop. Making it waits for a second call that makes another, here in vain."""
    both, made = threading.Barrier(2), asyncio.new_event_loop
    user_code._only_loop.cache_clear()

    def slow():
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.5)
        return made()

    async def loop_of():
        return asyncio.get_running_loop()

    async def two():
        monkeypatch.setattr(asyncio, "new_event_loop", slow)
        return await asyncio.gather(*(call_user_code(loop_of, seconds=60.0) for _ in range(2)))

    first, second = asyncio.run(two())
    assert first is second


async def test_blocking_calls_that_are_given_up_make_room_for_others_and_hold_no_thread_of_asyncio(monkeypatch):
    monkeypatch.setattr(user_code, "MAX_THREADS", 2)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    end = threading.Event()
    hanging = [asyncio.ensure_future(run_blocking(end.wait)) for _ in range(2)]
    waiting = asyncio.ensure_future(run_blocking(int, "7"))
    assert await asyncio.wait_for(asyncio.to_thread(int, "3"), 30) == 3
    assert not any(call.done() for call in (*hanging, waiting))
    hanging[0].cancel()
    assert await asyncio.wait_for(waiting, 30) == 7
    end.set()
    await hanging[1]


async def test_the_rollout_process_gets_a_thread_whatever_holds_the_others(monkeypatch):
    monkeypatch.setattr(user_code, "MAX_THREADS", 1)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    end = threading.Event()
    hanging = [asyncio.ensure_future(run(end.wait)) for run in (asyncio.to_thread, run_blocking, user_code_in_thread)]
    try:
        assert await asyncio.wait_for(in_thread(int, "3"), 30) == 3
        assert not any(call.done() for call in hanging)
    finally:
        end.set()
        await asyncio.gather(*hanging)


async def test_only_the_wait_for_a_thread_is_in_the_context_of_who_waits(monkeypatch):
    monkeypatch.setattr(user_code, "MAX_THREADS", 1)
    entered, left, begun, end = asyncio.Event(), asyncio.Event(), threading.Event(), threading.Event()

    @contextlib.contextmanager
    def context():
        entered.set()
        yield
        left.set()

    def hang():
        begun.set()
        end.wait()

    first = asyncio.ensure_future(run_blocking(hang))
    await asyncio.to_thread(begun.wait)
    with while_waiting(context):
        second = asyncio.ensure_future(run_blocking(left.is_set))
    await asyncio.wait_for(entered.wait(), 30)
    assert not left.is_set()
    end.set()
    await first
    assert await asyncio.wait_for(second, 30), "the wait is over when the function runs"


async def test_many_coroutines_wait_at_the_same_time_however_few_threads_there_are(monkeypatch):
    monkeypatch.setattr(user_code, "MAX_THREADS", 1)
    together = asyncio.Barrier(user_code.MAX_COROUTINES)

    class Judge:
        async def __call__(self, answer):
            await together.wait()
            return answer

    answers = range(user_code.MAX_COROUTINES)
    asked = [call_user_code(Judge(), answer, seconds=0) for answer in answers]
    assert await asyncio.wait_for(asyncio.gather(*asked), 60) == [*answers]


async def test_the_processes_of_a_run_divide_the_calls_at_a_time():
    user_code.limit_calls(lambda number: number // 4)
    assert user_code.call_slots(coroutines=True)._value == user_code.MAX_COROUTINES // 4
    assert user_code.call_slots(coroutines=False)._value == user_code.MAX_THREADS // 4
