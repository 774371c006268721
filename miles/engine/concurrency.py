"""Run many coroutines at once, and leave none behind when one fails."""

from __future__ import annotations

import asyncio
from collections import Counter
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


def waiting_tasks(loop: asyncio.AbstractEventLoop) -> Counter[str]:
    """Return the places at which tasks of an event loop wait, as ``file:line in function > …``, with their number.

    May be called from another thread. Frames of libraries are left out, apart from the innermost one.
    """
    places: Counter[str] = Counter()
    for task in asyncio.all_tasks(loop):
        frames = []
        waits: Any = task.get_coro()
        while waits is not None:
            frame = next((f for kind in ("cr", "gi", "ag") if (f := getattr(waits, f"{kind}_frame", None))), None)
            if frame is not None:
                file = frame.f_code.co_filename.rpartition("/miles/")
                is_own = bool(file[1]) and "site-packages" not in file[2]
                name = f"miles/{file[2]}" if file[1] else file[2]
                frames.append((is_own, f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"))
            waits = next(
                (w for kind in ("cr_await", "gi_yieldfrom", "ag_await") if (w := getattr(waits, kind, None))), None
            )
        shown = [text for number, (is_own, text) in enumerate(frames) if is_own or number == len(frames) - 1]
        places[" > ".join(shown) or "not started"] += 1
    return places
