"""Remove the shared-memory segments that servers leave: those that they have opened, and no others.

SGLang names a segment after a random id. Some it never removes. Others, such as the queue of 25 MB between the ranks of
tensor parallelism, stay if their process is killed, and SGLang kills its processes when it ends. So a server notes the
segments that its processes have open in its temporary folder (server_process.py); whoever removes that folder removes
them too. This file imports nothing that is slow to import.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

SHARED, SEMAPHORE = "/dev/shm/", "sem.mp-"
SEGMENTS = tuple(SHARED + name for name in ("sglang_loads_", "sgl_shm_", "psm_", SEMAPHORE))  # of SGLang, of vLLM
NOTED = "segments"  # one path per line


def open_segments(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the segments that these processes have open or mapped now."""
    segments: set[str] = set()
    semaphores = {str(file.inode()): file.path for file in os.scandir(SHARED) if file.name.startswith(SEMAPHORE)}
    for process in processes:
        with suppress(psutil.Error, OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines()
            mapped = [line.split(maxsplit=5) for line in maps]  # a semaphore is mapped, and not open
            paths = [*(entry[-1] for entry in mapped), *(file.path for file in process.open_files())]
            segments |= {path for path in paths if path.startswith(SEGMENTS) and not path.endswith("(deleted)")}
            # The process that made one has it mapped under the name that it had before, which is gone.
            of_shm = [entry[4] for entry in mapped if entry[-1].startswith(SHARED + "sem.")]
            segments |= {semaphores[number] for number in of_shm if number in semaphores}
    return segments


def begin_notes(folder: Path) -> None:
    """Begin the notes of a server. Raises ``OSError`` if the disk is full: the server could not write either."""
    (folder / NOTED).write_text("\n")


def note_segments(pid: int, folder: Path) -> None:
    """Add to the notes in ``folder`` which segments process ``pid`` and its descendants have open now."""
    with suppress(psutil.NoSuchProcess):
        server = psutil.Process(pid)
        segments = open_segments([server, *server.children(recursive=True)]) - _noted(folder / NOTED)
        if segments:
            with (folder / NOTED).open("a") as notes:
                notes.write("".join(f"{path}\n" for path in sorted(segments)))


def remove_server_folder(folder: Path) -> None:
    """Remove the temporary folder of a server that is ending, and the segments that are noted in it."""
    remove_segments(folder)
    shutil.rmtree(folder, ignore_errors=True)


def remove_segments(folder: Path, segments: Iterable[str] = ()) -> None:
    """Remove the segments that are noted in ``folder`` or a folder in it, and those that were ``segments`` open."""
    for segment in set(segments).union(*map(_noted, folder.rglob(NOTED))):
        with suppress(OSError):  # removed meanwhile
            Path(segment).unlink()


def _noted(path: Path) -> set[str]:
    try:
        lines = path.read_text(errors="replace").splitlines(keepends=True)
    except OSError:  # removed meanwhile, or another program's folder of this name
        return set()
    # The last one may have been cut when the server was killed.
    return {line.strip() for line in lines if line.endswith("\n") and line.startswith(SEGMENTS)}
