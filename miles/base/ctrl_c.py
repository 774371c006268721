"""Answer Ctrl-C before a run listens to signals itself (run/stop_requests.py): one sentence, and status 130.

During an import, a ``KeyboardInterrupt`` can be lost in a callback, or end in a traceback of the import.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STATUS = 128 + signal.SIGINT


@contextmanager
def ending_at_ctrl_c(last_line: str) -> Iterator[None]:
    """Let Ctrl-C end the process at once, with ``last_line`` on stderr; for a block that has nothing to clean up."""

    def end(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{last_line}\n".encode(errors="backslashreplace"))
        os._exit(STATUS)

    with _handling(end):
        yield


@contextmanager
def raising_at_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C raise ``KeyboardInterrupt`` in the block, as Python does by default."""
    with _handling(signal.default_int_handler):
        yield


@contextmanager
def _handling(handler: Any) -> Iterator[None]:
    """Handle SIGINT in the block, unless it is ignored, as in a job in the background. Other threads cannot."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield
        return
    former = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
