"""Daemon threads for calls that block, and coroutines that end together.

A thread is there at once, however many others hang, and a process that ends does not wait for it. The few threads of
``asyncio.to_thread`` are left to coroutines of the user's, whose calls may hold them for good.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_idle: list[SimpleQueue[Callable[[], None]]] = []  # the queues of threads that have no call


def start_in_thread(call: Callable[[], None]) -> None:
    """Begin ``call``, which must not raise, in a thread that it has to itself.

    A thread whose call has returned takes another, because starting one costs more.
    """
    try:
        calls = _idle.pop()
    except IndexError:
        calls = SimpleQueue()
        threading.Thread(target=_serve, args=(calls,), name="blocking-calls", daemon=True).start()
    calls.put(call)


def _serve(calls: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        calls.get()()
        _idle.append(calls)


async def in_thread(function: Callable[..., T], /, *args: Any, **named: Any) -> T:
    """Return ``function(*args, **named)`` from a thread. A call that is cancelled leaves its thread behind.

    Raises:
        RuntimeError: If it raises ``StopIteration``, which would hang the future, as in a coroutine.
        BaseException: Whatever else it raises.
    """
    outcome: Future[T] = Future()
    start_in_thread(partial(_settle, outcome, partial(copy_context().run, partial(function, *args, **named))))
    return await asyncio.wrap_future(outcome)


def _settle(outcome: Future[T], call: Callable[[], T]) -> None:
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except StopIteration as error:
        stopped = RuntimeError("the function raised StopIteration")
        stopped.__cause__ = error
        outcome.set_exception(stopped)
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks, and return when all have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the coroutines concurrently and return their results in order.

    Raises the first exception unchanged, after the others were cancelled and have ended. (``asyncio.gather`` would let
    them run on; ``asyncio.TaskGroup`` would wrap the user's error in an ``ExceptionGroup``.)
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await cancel_all(tasks)
        raise
