"""Run a server that notes its shared memory in its temporary folder (leftovers.py).

The command is ``python -m miles.engine.servers.server_process MODULE ARGUMENTS…``. The server notes it itself, because
its parent process can be stopped or killed while it starts.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

from miles.engine.servers.leftovers import note_segments

SHORTEST_PAUSE = 0.2  # seconds; a server that is killed within one leaves the segments opened since the last note
PAUSE_SHARE = 0.01  # of the time since the start: servers open segments while they start, large ones for minutes


def note_until_end(folder: Path) -> None:
    """Note the segments of this process and its descendants, as long as it lives."""
    began = time.monotonic()
    while True:
        with suppress(OSError):  # the disk is full; there may be room next time
            note_segments(os.getpid(), folder)
        time.sleep(max(SHORTEST_PAUSE, PAUSE_SHARE * (time.monotonic() - began)))


if __name__ == "__main__":
    threading.Thread(target=note_until_end, args=(Path(gettempdir()),), daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
