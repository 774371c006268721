"""Errors of the user's code as ordinary exceptions.

``StopIteration`` that reaches a future hangs its waiter. ``SystemExit`` or ``KeyboardInterrupt`` ends an event loop,
and a worker of Ray, which is then reported as dead.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from miles.base.one_line import name_and_words, one_line

_LONGEST = 300


class UserCodeError(Exception):
    """User code raised something that is not an ``Exception``, or ``StopIteration``. The cause is what it raised."""


def as_exception(error: BaseException, origin: str = "") -> Exception:
    """Return ``error`` if it is ordinary, else a ``UserCodeError`` that says what ``origin`` raised."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    wrapped = UserCodeError(f"{origin} raised {one_line(name_and_words(error), _LONGEST)}".lstrip())
    wrapped.__cause__ = error
    return wrapped


@contextmanager
def ordinary_errors(origin: str) -> Iterator[None]:
    """Run user code in this context, and it raises ordinary exceptions only. A cancellation passes as it is.

    Raises:
        UserCodeError: Instead of ``StopIteration``, ``SystemExit``, ``KeyboardInterrupt`` and the like, and instead
            of ``CancelledError`` if nobody has cancelled the task that runs.
    """
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        ordinary = as_exception(error, origin)
        if ordinary is error:
            raise
        raise ordinary from error


def _is_cancelled() -> bool:
    """Return whether somebody has cancelled the task that runs, if one does."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return False
    return task is not None and task.cancelling() > 0


def raising_exceptions(function: Callable[..., Any], origin: str) -> Callable[..., Any]:
    """Return ``function`` in ``ordinary_errors``. A class is returned as it is.

    ``function`` may be a coroutine function, or an object whose ``__call__`` is one.
    """
    if inspect.isclass(function):
        return function

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        with ordinary_errors(origin):
            result = function(*args, **named)
        return awaited(result) if inspect.isawaitable(result) else result

    async def awaited(result: Awaitable[Any]) -> Any:
        with ordinary_errors(origin):
            return await result

    @functools.wraps(function)
    async def coroutine(*args: Any, **named: Any) -> Any:
        return await call(*args, **named)

    return coroutine if inspect.iscoroutinefunction(function) else call
