"""Leave nothing of a run on this machine behind, however its launcher ends.

The launcher starts one small process, the guard, before it starts Ray. The guard waits until its standard input closes,
which the launcher does at its end and the kernel does if the launcher is killed. Then it kills every process of the run
that is left and removes the run's folder, with Ray's session and the servers' temporary files in it. It is in a
separate session, so a closed terminal does not reach it.

The launcher marks its process, and all that it starts from then on inherits the mark from the kernel: the soft limit of
RLIMIT_LOCKS, which Linux has ignored since 2.4.25 and which no library sets. A process may lose its parent, and write
its title over its environment, as Ray's processes do; it keeps the mark. If the limit cannot be set, processes of a run
are those with ``MILES_RUN_FOLDER`` in their environment and their descendants.

The folder holds a locked file. The kernel releases the lock when both launcher and guard are gone, and the next
launcher of this user removes such a folder.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

import psutil

from miles.base.processes import RUN_FOLDER, importing_miles, kill_all
from miles.engine.servers.leftovers import open_segments, remove_segments
from miles.run.stop_requests import ignore_stops

LOCK = "lock"
DETACHED = "--detached"
END_SECONDS = 10.0  # for killed processes to end
GUARD_SECONDS = 20.0  # for the guard to end


class RunGuard:
    """Hold the folder of a run, and the guard process that cleans up after it.

    Args:
        root: The folder of this user's runs. The leftovers of killed runs in it are removed.
        is_detached: Whether the guard is no child of this process: a worker of Ray kills its children when it ends.
            It cannot be closed then, and its process id is not known.
    """

    def __init__(self, root: Path, is_detached: bool = False) -> None:
        with locked(root / LOCK):
            remove_stale(root)
            self.folder = Path(mkdtemp(prefix="r", dir=root))  # short, as sockets are in it
            self._lock = (self.folder / LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        inherited = {name: value for name, value in os.environ.items() if name != RUN_FOLDER}
        words = [str(self.folder), str(os.getpid()), *[DETACHED] * is_detached]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "miles.run.run_guard", *words],
            env=inherited | importing_miles(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(self._lock.fileno(),),  # the guard holds the lock too
            preexec_fn=ignore_stops,  # which are for the launcher
        )
        os.environ[RUN_FOLDER] = str(self.folder)
        self._limits = psutil.Process().rlimit(psutil.RLIMIT_LOCKS)
        _mark(mark_of(str(self.folder)), self._limits)
        if is_detached:
            self._process.wait()  # its child is the guard

    @property
    def pid(self) -> int:
        """The process id of the guard."""
        return self._process.pid

    def close(self) -> bool:
        """Have the guard kill and remove the rest of the run; return whether it has ended all processes in time."""
        os.environ.pop(RUN_FOLDER, None)
        _mark(self._limits[0], self._limits)
        self._lock.close()
        if self._process.poll() is not None:  # it was killed
            return clean_up(self.folder)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # it continues alone
            return self._process.wait(GUARD_SECONDS) == 0
        return False


def mark_of(folder: str) -> int:
    """Return the mark of the processes of the run in ``folder``: a number that no other run has, and no usual limit."""
    return 2**61 + int.from_bytes(hashlib.sha256(os.fsencode(folder)).digest()[:7])


def _mark(number: int, limits: tuple[int, int]) -> None:
    """Set the soft limit of this process that marks it; ``limits`` are the soft and hard one that it had before."""
    with suppress(psutil.AccessDenied, ValueError, OSError):  # the hard limit is lower, or the system refuses
        psutil.Process().rlimit(psutil.RLIMIT_LOCKS, (number, limits[1]))


def remove_stale(root: Path) -> None:
    """Remove the folders of runs in ``root`` whose launcher and guard are gone, and end the rest of those runs."""
    for folder in stale_folders(root):
        with suppress(OSError):
            clean_up(folder)


def stale_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of runs in ``root`` whose launcher and guard are gone, each locked while it is in use."""
    for path in root.glob(f"*/{LOCK}"):
        with suppress(OSError), path.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: the run is alive
            yield path.parent


def clean_up(folder: Path, launcher: psutil.Process | None = None) -> bool:
    """End the processes of the run whose folder this is, and remove their shared memory and the folder.

    Args:
        folder: The folder of the run.
        launcher: The process that holds the guard. It is left alone: if it lives, it is about to end on its own.

    Returns:
        Whether all have ended.
    """
    killed: set[int] = set()
    segments: set[str] = set()
    until = time.monotonic() + END_SECONDS
    while (processes := [each for each in members(str(folder)) if each != launcher]) and time.monotonic() < until:
        segments |= open_segments(processes)  # one that was opened a moment ago is not noted yet
        killed |= kill_all(processes, 1.0)
    remove_segments(folder, segments)
    _remove_tensors(killed)
    shutil.rmtree(folder, ignore_errors=True)
    return not processes


def _remove_tensors(pids: Iterable[int]) -> None:
    """Remove the tensors that these processes have shared by name, as for a weight update.

    PyTorch has a process that removes them, which was killed with the others.
    """
    for pid in pids:
        for segment in Path("/dev/shm").glob(f"torch_{pid}_*"):
            with suppress(OSError):  # of another user, or removed meanwhile
                segment.unlink()


def members(folder: str) -> list[psutil.Process]:
    """Return the processes of a run, and their descendants."""
    by_pid: dict[int, psutil.Process] = {}
    mark = mark_of(folder)
    for process in psutil.process_iter():
        if process.pid not in by_pid and _is_marked(process, mark, folder):
            with suppress(psutil.Error):
                by_pid |= {each.pid: each for each in (process, *process.children(recursive=True))}
    return [process for process in by_pid.values() if process.pid != os.getpid() and not _has_ended(process)]


def _is_marked(process: psutil.Process, mark: int, folder: str) -> bool:
    with suppress(psutil.Error, OSError):
        if process.rlimit(psutil.RLIMIT_LOCKS)[0] == mark:
            return True
    with suppress(psutil.Error):
        return bool(process.environ().get(RUN_FOLDER) == folder)
    return False


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of the file ``path``, which is created if needed, for the length of the block."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(folder: Path, pid: int) -> None:
    """Wait for the end of the launcher, whose process id is ``pid``, then clean up after its run."""
    launcher = psutil.Process(pid) if psutil.pid_exists(pid) else None
    sys.stdin.buffer.read()
    sys.exit(0 if clean_up(folder, launcher) else 1)


if __name__ == "__main__":
    if DETACHED in sys.argv and os.fork():
        os._exit(0)
    main(Path(sys.argv[1]), int(sys.argv[2]))
