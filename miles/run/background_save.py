"""A checkpoint whose files the trainer's ranks write during training (``--async-save``).

Each rank has copied its part into memory, and a thread of the rank writes it. A thread of the launcher waits for all
ranks, and publishes the checkpoint when the last file is on the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import ray


class BackgroundSave:
    """Waits for the ranks in a thread, then calls ``publish`` with what they return.

    Args:
        calls: One per rank; each returns when the rank has written its files.
        publish: Makes the checkpoint appear.
        naming: Makes the context for both, which can name the disk in an error.
    """

    def __init__(
        self,
        calls: Sequence[ray.ObjectRef[Any]],
        publish: Callable[[list[Any]], None],
        naming: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.calls = list(calls)
        self._publish = publish
        self._naming = naming
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="background-save", daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended by an error; ``end`` raises it."""
        return self._failure is not None

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, at most ``seconds``."""
        self._thread.join(seconds)

    def end(self) -> None:
        """Wait until it has ended.

        Raises:
            BaseException: Whatever a rank or ``publish`` has raised.
        """
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with self._naming():
                self._publish(ray.get(self.calls))
        except BaseException as error:  # raised again by ``end``, in the thread that runs the loop
            self._failure = error
