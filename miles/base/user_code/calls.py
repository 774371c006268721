"""Run reward functions and other user code so that nothing it does can stop or hang the rollout side.

A call of a function has a daemon thread to itself until it returns (``miles/base/threads.py``). A coroutine runs on one
event loop that all such calls share and nothing else uses: a blocking call in it delays only them. It needs no thread
while it waits, so many more calls of coroutine functions are made at a time. Whatever a function raises arrives as an
ordinary exception: a ``StopIteration`` that reaches a future would hang its waiter, and a ``SystemExit`` or
``KeyboardInterrupt`` would end the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from miles.base.threads import in_thread, start_in_thread
from miles.base.user_code.errors import as_exception, ordinary_errors

MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)  # calls of one kind at a time, as in asyncio.to_thread
MAX_COROUTINES = 256  # calls of coroutine functions at a time; each may have a connection open

T = TypeVar("T")


class UserCodeTimeout(Exception):
    """User code did not return in time."""


async def call_user_code(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """Return ``function(*args)``, awaited if it is awaitable.

    Args:
        function: A function, a coroutine function, or an object with either as ``__call__``.
        args: Its arguments.
        seconds: The longest time to wait; 0 waits without a limit. A thread that does not return is left behind, as
            Python cannot stop it; a coroutine is cancelled.

    Raises:
        UserCodeTimeout: If the function does not return within ``seconds``.
        UserCodeError: If it raises ``StopIteration``, ``SystemExit``, ``KeyboardInterrupt`` or the like.
        Exception: Any other exception that it raises.
    """
    async with call_slots(makes_coroutines(function)):
        call = UserCall(function, args)
        try:
            async with asyncio.timeout(seconds or None):
                return await asyncio.wrap_future(call.outcome)
        except TimeoutError:
            if call.outcome.done() and not call.outcome.cancelled():  # the function raised it
                raise
            raise UserCodeTimeout(f"did not return within {seconds:g} s") from None
        finally:
            call.abandon()


async def run_blocking(function: Callable[..., T], *args: Any, **named: Any) -> T:
    """Return ``function(*args, **named)`` from a daemon thread, once fewer than ``MAX_THREADS`` such calls are awaited.

    For what trajectories call: tools, and what blocks in an environment. A call that is cancelled, as by
    ``--agent-timeout``, leaves its thread behind and makes room for another.

    Raises:
        UserCodeError: If it raises ``StopIteration``, ``SystemExit``, ``KeyboardInterrupt`` or the like.
        Exception: Any other exception that it raises.
    """
    slots = _slots(_blocking_slots, MAX_THREADS)
    with _while_waiting.get()():
        await slots.acquire()
    try:
        return await user_code_in_thread(function, *args, **named)
    finally:
        slots.release()


@contextmanager
def while_waiting(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Make ``run_blocking`` enter ``context()`` while it waits for a thread, in tasks that this block creates."""
    token = _while_waiting.set(context)
    try:
        yield
    finally:
        _while_waiting.reset(token)


_while_waiting: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar(
    "_while_waiting", default=nullcontext
)


async def user_code_in_thread(function: Callable[..., T], *args: Any, **named: Any) -> T:
    """Return ``function(*args, **named)`` from a daemon thread, which is there at once, whatever other calls do.

    For what the rollout process itself awaits and what calls user code, such as hooks on an iteration.

    Raises:
        UserCodeError: If it raises ``StopIteration``, ``SystemExit``, ``KeyboardInterrupt`` or the like.
        Exception: Any other exception that it raises.
    """
    return await in_thread(_call, function, args, named)


def _call(function: Callable[..., T], args: tuple[Any, ...], named: dict[str, Any]) -> T:
    with ordinary_errors("a function of the user's"):
        return function(*args, **named)


def makes_coroutines(function: Callable[..., Any]) -> bool:
    """Return whether a call of ``function`` only makes a coroutine, and so does not need a thread."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class UserCall:
    """One call, in a thread that it has to itself unless it only makes a coroutine, and its outcome."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.outcome: Future[Any] = Future()
        self._function = function
        self._args = args
        self._coroutine: Future[Any] | None = None
        self._abandoned = False
        if makes_coroutines(function):
            self._coroutine = asyncio.run_coroutine_threadsafe(_ordinary(function, args), _shared_loop())
            self._coroutine.add_done_callback(lambda coroutine: self._settle(coroutine.result))
        else:
            start_in_thread(lambda: self._settle(self._returned))

    def abandon(self) -> None:
        """Cancel a coroutine that is still running."""
        self._abandoned = True
        if self._coroutine is not None:
            self._coroutine.cancel()

    def _returned(self) -> Any:
        result = self._function(*self._args)
        if not inspect.isawaitable(result):
            return result
        self._coroutine = asyncio.run_coroutine_threadsafe(_ordinary(lambda: result), _shared_loop())
        if self._abandoned:
            self._coroutine.cancel()
        return self._coroutine.result()

    def _settle(self, result: Callable[[], Any]) -> None:
        """Make what ``result`` returns or raises the outcome."""
        try:
            settle = partial(self.outcome.set_result, result())
        except BaseException as error:
            settle = partial(self.outcome.set_exception, as_exception(error))
        if self.outcome.set_running_or_notify_cancel():  # False if the caller waits no longer
            settle()


async def _ordinary(function: Callable[..., Awaitable[Any]], args: tuple[Any, ...] = ()) -> Any:
    """Return the awaited result of a call; an error that is no ``Exception`` must not reach the event loop."""
    with ordinary_errors(""):
        return await function(*args)


def _shared_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop on which the coroutines of user code run, in a daemon thread."""
    with _making_loop:  # two first calls at the same time would make two: a client of a server belongs to one
        return _only_loop()


_making_loop = threading.Lock()


@cache
def _only_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="user-code-loop", daemon=True).start()
    return loop


_Slots = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]  # they bound the calls at a time
_thread_slots: _Slots = WeakKeyDictionary()
_coroutine_slots: _Slots = WeakKeyDictionary()
_blocking_slots: _Slots = WeakKeyDictionary()


def limit_calls(share: Callable[[int], int]) -> None:
    """Limit the calls of reward functions at a time on the running event loop to this process's ``share`` of them."""
    loop = asyncio.get_running_loop()
    _thread_slots[loop] = asyncio.Semaphore(share(MAX_THREADS))
    _coroutine_slots[loop] = asyncio.Semaphore(share(MAX_COROUTINES))


def call_slots(coroutines: bool) -> asyncio.Semaphore:
    """Return the semaphore of the running event loop which bounds the calls of reward functions at a time.

    Args:
        coroutines: Whether the function makes coroutines (``makes_coroutines``).
    """
    return _slots(_coroutine_slots, MAX_COROUTINES) if coroutines else _slots(_thread_slots, MAX_THREADS)


def _slots(slots: _Slots, number: int) -> asyncio.Semaphore:
    return slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(number))
