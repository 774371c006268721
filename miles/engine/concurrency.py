"""Run many coroutines at once, and leave none behind when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the coroutines concurrently and return their results in order.

    Raises the first exception as it is, after the others were cancelled and have ended. (``asyncio.gather`` would let
    them run on; ``asyncio.TaskGroup`` would wrap the user's error in an ``ExceptionGroup``.)
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
