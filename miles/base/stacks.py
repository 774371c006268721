"""The stacks of all threads of a process, written to a file when another process sends it SIGUSR2.

``faulthandler`` writes them inside the signal handler, so it works while code holds Python's lock or waits in a
library. The files are in the temporary folder of the run, on this machine (``RUN_FOLDER``). ``waiting_tasks`` reports
coroutines.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from miles.base.processes import RUN_FOLDER

SIGNAL = signal.SIGUSR2
_FOLDER = "stacks"
_LOOK_SECONDS = 0.05
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x\w+", re.MULTILINE)
_FRAME = re.compile(r'^  File "([^"\n]*)", line (\d+) in (\S+)$', re.MULTILINE)

_own_file: BinaryIO | None = None  # stays open: the signal handler writes to it


def answer_requests() -> None:
    """Have SIGUSR2 write the stacks of this process's threads.

    Does nothing outside of a run, and in a joined cluster.
    """
    global _own_file
    folder = os.environ.get(RUN_FOLDER)
    if folder is None:
        return
    path = Path(folder, _FOLDER, str(os.getpid()))
    path.parent.mkdir(exist_ok=True)
    _own_file = path.open("ab", buffering=0)
    faulthandler.register(SIGNAL, _own_file, all_threads=True, chain=False)


def own_stacks() -> str:
    """Return the stacks of this process's threads, the calling one included."""
    from tempfile import TemporaryFile  # lazily: the children that score answers start without it

    with TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def request_stacks(folder: Path, pids: Collection[int], seconds: float) -> dict[int, str]:
    """Ask processes of a run for the stacks of their threads, and return the answers by process id.

    A process that is stopped continues, or it could not answer; ask only before it is ended. Processes that do not
    handle the signal are left alone, since it would end them.

    Args:
        folder: The run's temporary folder.
        pids: The processes.
        seconds: How long to wait for all answers.
    """
    asked: dict[int, tuple[Path, int, set[str]]] = {}
    for pid in pids:
        file = folder / _FOLDER / str(pid)
        with suppress(OSError):
            if not _mask(Path(f"/proc/{pid}/status").read_text(), "SigCgt") & _BIT:  # it has no handler
                continue
            asked[pid] = (file, file.stat().st_size, _handling(pid))
            os.kill(pid, SIGNAL)
            os.kill(pid, signal.SIGCONT)
    stacks: dict[int, str] = {}
    until = time.monotonic() + seconds
    while asked:
        is_late = time.monotonic() > until
        for pid, (file, before, always_blocked) in list(asked.items()):
            with suppress(OSError):
                if is_late or (file.stat().st_size > before and _handling(pid) <= always_blocked):
                    with file.open("rb") as answers:
                        answers.seek(before)
                        stacks[pid] = answers.read().decode(errors="replace")
                    del asked[pid]
                continue
            del asked[pid]  # it has ended
        if is_late:
            break
        time.sleep(_LOOK_SECONDS)
    return {pid: text for pid, text in stacks.items() if text}


def frames(stacks: str) -> list[list[tuple[str, int, str]]]:
    """Return, for each thread, the file, line and function of its frames, innermost first."""
    starts = [match.start() for match in _THREAD.finditer(stacks)] or [0]
    threads = [stacks[start:end] for start, end in zip(starts, [*starts[1:], len(stacks)], strict=True)]
    return [[(file, int(line), name) for file, line, name in _FRAME.findall(thread)] for thread in threads]


def _handling(pid: int) -> set[str]:
    """Return the threads that block the signal, as a thread does while its handler runs, or have it pending."""
    threads = set()
    for path in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            status = (path / "status").read_text()
            if (_mask(status, "SigBlk") | _mask(status, "SigPnd")) & _BIT:
                threads.add(path.name)
            if _mask(status, "ShdPnd") & _BIT:
                threads.add("")
    return threads


_BIT = 1 << (SIGNAL - 1)


def _mask(status: str, name: str) -> int:
    match = re.search(rf"^{name}:\s*(\w+)$", status, re.MULTILINE)
    return 0 if match is None else int(match[1], 16)


def waiting_tasks(loop: asyncio.AbstractEventLoop) -> Counter[str]:
    """Return the code lines at which tasks of an event loop wait, as ``file:line in function > …``, with their number.

    May be called from another thread. Frames of libraries are left out, apart from the innermost one.
    """
    counts: Counter[str] = Counter()
    for task in asyncio.all_tasks(loop):
        calls = []
        waits: Any = task.get_coro()
        while waits is not None:
            frame = _first_attribute(waits, "cr_frame", "gi_frame", "ag_frame")
            if frame is not None:
                file = frame.f_code.co_filename.rpartition("/miles/")
                is_own = bool(file[1]) and "site-packages" not in file[2]
                name = f"miles/{file[2]}" if file[1] else file[2]
                calls.append((is_own, f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"))
            waits = _first_attribute(waits, "cr_await", "gi_yieldfrom", "ag_await")
        lines = [text for number, (is_own, text) in enumerate(calls) if is_own or number == len(calls) - 1]
        counts[" > ".join(lines) or "not started"] += 1
    return counts


def _first_attribute(owner: Any, *names: str) -> Any:
    """Return the first of these attributes that is there and true; None without one."""
    return next(filter(None, (getattr(owner, name, None) for name in names)), None)
