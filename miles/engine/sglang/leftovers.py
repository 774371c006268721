"""Remove the shared-memory segments that SGLang leaves: those that its servers have opened, and no others.

SGLang names a segment after a random id. Some it never removes. Others, such as the queue of 25 MB between the ranks of
tensor parallelism, stay if their process is killed, and SGLang kills its processes when it ends. So while a server
starts, the segments that its processes have open are noted in its temporary folder; whoever removes that folder removes
them too. This file imports nothing that is slow to import.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import psutil

SEGMENTS = ("/dev/shm/sglang_loads_", "/dev/shm/sgl_shm_")  # how their paths begin
NOTED = "segments.json"


def note_segments(pid: int, folder: Path) -> None:
    """Write to ``folder`` which segments process ``pid`` and its descendants have open now."""
    with suppress(psutil.NoSuchProcess):
        server = psutil.Process(pid)
        found = set(_noted(folder / NOTED))
        for process in (server, *server.children(recursive=True)):
            with suppress(psutil.Error):
                found |= {file.path for file in process.open_files() if file.path.startswith(SEGMENTS)}
        (folder / NOTED).write_text(json.dumps(sorted(found)))


def remove_segments(folder: Path) -> None:
    """Remove the segments that are noted in ``folder`` or a folder in it."""
    for path in folder.rglob(NOTED):
        for segment in _noted(path):
            if segment.startswith(SEGMENTS):
                Path(segment).unlink(missing_ok=True)


def _noted(path: Path) -> list[str]:
    try:
        noted: list[str] = json.loads(path.read_text())
        return noted
    except (FileNotFoundError, ValueError):  # none yet, or killed while it was written
        return []
