"""Upload checkpoints and exports during the run (``--save`` and ``--save-hf`` with a URL).

One thread uploads what the run has written to this machine, in order. After a checkpoint it does what is due after one:
records the best, prunes, and removes what is pruned from the remote folder too. So nothing is removed there before
something newer is complete there.

An upload that fails, after the tries of ``RemoteFolder``, does not stop the run. Its files stay on this machine. It is
tried again every ``AGAIN_SECONDS``, after the next save, and when the run ends; if that fails too, the run fails.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from miles.base.flags import count
from miles.base.host.disk_faults import WriteFailed
from miles.base.remote_folder import RemoteError, RemoteFolder, is_url
from miles.base.remote_lock import RemoteLock
from miles.config.settings import Settings
from miles.run.folders.best_checkpoint import BestCheckpoint, remove_superseded
from miles.run.folders.remote_checkpoints import RemoteCheckpoints, pending_in
from miles.training.checkpoint_folder import iterations_of, remove

AGAIN_SECONDS = 300.0
MOST_WAITING = 2  # checkpoints: a further save waits, so that a slow network does not fill the disk
LAST_SECONDS = 60.0  # for uploads when the run fails
NOTE_SECONDS = 60.0  # between two notes that the run waits for uploads
_LAST = "config.json"  # of an export: without it, nothing loads the folder


@dataclass(frozen=True)
class _Upload:
    """A folder on this machine, and the URL that it goes to: of a Hugging Face export, or None for a checkpoint."""

    folder: Path
    export: str | None = None
    best: BestCheckpoint | None = None


class Uploads:
    """The uploads of a run, in a thread that starts with the first.

    Args:
        settings: The run, with its own folder as ``--save``.
        lock: The lock of that folder; None if it is on this machine.
    """

    def __init__(self, settings: Settings, lock: RemoteLock | None) -> None:
        given = settings.checkpoint
        self._settings = settings
        self._lock = lock
        self._remote = RemoteCheckpoints.of(given, given.save) if given.save and is_url(given.save) else None
        self._giving_up = threading.Event()
        if self._remote is not None:
            self._remote.remote.giving_up = self._giving_up
        self._changed = threading.Condition()
        self._waiting: list[_Upload] = []
        self._started = 0  # tries of uploads
        self._ended = 0  # those of them that have ended
        self._try_at = 0.0  # monotonic time of the next try
        self._failure: Exception | None = None  # of the last try
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)

    @property
    def has_checkpoints(self) -> bool:
        """Whether checkpoints are uploaded, and not only exports."""
        return self._remote is not None

    @property
    def left(self) -> int:
        """How many checkpoints and exports are not uploaded yet."""
        return len(self._waiting)

    def make_room(self, folder: Path) -> None:
        """Wait while too many checkpoints wait or ``folder`` is one of them, unless uploads fail."""
        notes = self._notes_of_waiting()
        with self._changed:
            while self._failure is None and (
                sum(each.export is None for each in self._waiting) >= MOST_WAITING
                or any(each.folder == folder for each in self._waiting)
            ):
                self._changed.wait(1.0)
                next(notes)

    def add_checkpoint(self, saved: Path, best: BestCheckpoint | None = None) -> None:
        """Upload a checkpoint of the local copy; ``best`` is its record if it is the best so far."""
        self._add(_Upload(saved, best=best))

    def add_export(self, folder: Path, url: str) -> None:
        """Upload a Hugging Face folder, and remove it from this machine when it is there."""
        self._add(_Upload(folder, export=url))

    def settle(self) -> None:
        """Wait until all is uploaded, with one more try of what has failed, also of what fails meanwhile.

        Raises:
            WriteFailed: That try has failed too. The message says what is safe on this machine.
        """
        with self._changed:
            notes = self._notes_of_waiting()
            started = self._started  # a try that started earlier may fail for a reason that no longer holds
            while self._waiting and (self._failure is None or self._ended <= started):
                self._try_at = 0.0
                self._changed.notify_all()
                self._changed.wait(1.0)
                next(notes)
            if self._waiting:
                raise WriteFailed(self._words()) from self._failure
        if self._remote is not None:
            try:
                self._remote.upload_records(self._output_dir)
            except OSError as error:
                raise WriteFailed(
                    f"the checkpoints are uploaded, but not metrics.jsonl of the run, as {error}"
                ) from error

    def close(self, seconds: float) -> None:
        """End the thread, after at most ``seconds`` for what waits."""
        until = time.monotonic() + seconds
        with self._changed:
            while self._waiting and self._failure is None and (left := until - time.monotonic()) > 0:
                self._changed.wait(min(left, 1.0))
            self._is_closing = True
            self._giving_up.set()
            self._changed.notify_all()

    @property
    def _output_dir(self) -> Path:
        return Path(self._settings.tracking.output_dir)

    def _add(self, upload: _Upload) -> None:
        with self._changed:
            self._drop_superseded(upload)
            self._waiting.append(upload)
            self._try_at = 0.0
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()

    def _drop_superseded(self, new: _Upload) -> None:
        """Drop what waits and is not wanted any more: exports to the same URL, and checkpoints while uploads fail.

        These would be pruned as soon as they are uploaded, and fill the disk until then. The first may be uploading.
        """
        later = self._waiting[1:]
        dropped = [each for each in later if each.export is not None and each.export == new.export]
        given = self._settings.checkpoint
        last, interval = given.save_keep_last, given.save_retain_interval
        if new.export is None and self._failure is not None and (last or interval):
            checkpoints = [each for each in later if each.export is None]
            for each in checkpoints[: len(checkpoints) + 1 - (last or 1)]:
                done = iterations_of(each.folder) or 0
                if each.best is None and (interval is None or done % interval):
                    dropped.append(each)
        for each in dropped:
            self._waiting.remove(each)
            if each.export is None:
                remove(each.folder)
            else:
                shutil.rmtree(each.folder, ignore_errors=True)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closing and (not self._waiting or time.monotonic() < self._try_at):
                    self._changed.wait(max(0.0, self._try_at - time.monotonic()) if self._waiting else None)
                if self._is_closing:
                    return
                upload = self._waiting[0]
                self._started += 1
            failure = self._failure_of(upload)
            with self._changed:
                was_failing = self._failure is not None
                self._ended += 1
                self._failure = failure
                self._try_at = 0.0 if failure is None else time.monotonic() + AGAIN_SECONDS
                if failure is None:
                    self._waiting.remove(upload)
                elif not was_failing and not self._is_closing:
                    again = (
                        f"it is tried again every {AGAIN_SECONDS:g} s, after the next save, and at the end of the run"
                    )
                    print(f"note: {self._words()}; {again}", flush=True)
                self._changed.notify_all()

    def _failure_of(self, upload: _Upload) -> Exception | None:
        """Upload a folder; return why that failed."""
        try:
            if not upload.folder.is_dir():  # pruned meanwhile
                return None
            if upload.export is not None:
                self._upload_export(upload.folder, upload.export)
            else:
                self._upload_checkpoint(upload)
        except Exception as error:  # the loop reports it, in the thread of the run
            return error
        return None

    def _upload_checkpoint(self, upload: _Upload) -> None:
        assert self._remote is not None
        self._remote.upload(upload.folder, before_publishing=self._check_lock)
        remove_superseded(upload.folder, self._settings, upload.best)
        self._remote.upload_records(self._output_dir)
        self._remote.remove_others()

    def _check_lock(self) -> None:
        if self._lock is not None and not self._lock.is_held():
            raise RemoteError("another run has taken over the lock of this folder")

    def _upload_export(self, folder: Path, url: str) -> None:
        remote = RemoteFolder(url, self._settings.checkpoint.file_system_options)
        remote.giving_up = self._giving_up
        sizes = {
            path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()
        }
        before = remote.files()
        remote.upload(folder, sizes.keys() - {_LAST})
        remote.remove(name for name in before if ".safetensors" in name and name not in sizes)
        remote.upload(folder, sizes.keys() & {_LAST})
        found = remote.files()
        for name, size in sizes.items():
            if found.get(name) != size:
                raise RemoteError(f"{remote}: {name} is not there as it was uploaded ({size} bytes)")
        shutil.rmtree(folder)

    def _notes_of_waiting(self) -> Iterator[None]:
        """Print, at most every ``NOTE_SECONDS``, what the run waits for. The caller advances it while it waits."""
        began = noted = time.monotonic()
        while True:
            now = time.monotonic()
            if self._waiting and now - noted >= NOTE_SECONDS:
                noted = now
                print(
                    f"note: the run has been waiting for the upload of {self._waiting[0].folder} for "
                    f"{now - began:.0f} s; not uploaded yet: {count(len(self._waiting), 'folder')}",
                    flush=True,
                )
            yield

    def _words(self) -> str:
        """Warn about folders that were not uploaded: the reason, and their local paths."""
        first, given = self._waiting[0], self._settings.checkpoint
        more = f" and {count(len(self._waiting) - 1, 'later folder')}" if len(self._waiting) > 1 else ""
        if first.export is not None:
            what = f"--save-hf {first.export}: the export{more}"
        else:
            what = f"--save {given.save}: the checkpoint after {iterations_of(first.folder)} iterations{more}"
        return f"{what} is not uploaded, because {self._failure}; it is complete in {first.folder}"


@contextmanager
def uploading(settings: Settings, lock: RemoteLock | None, damaged: Collection[Path] = ()) -> Iterator[Uploads | None]:
    """Upload what the block saves and exports, if a URL says so; first what an earlier run could not upload.

    Args:
        settings: The run, with its own folder as ``--save``.
        lock: The lock of that folder, if it is in remote storage.
        damaged: Checkpoints that were passed over.
    """
    given = settings.checkpoint
    if not given.urls.keys() & {"save", "save_hf"}:
        yield None
        return
    uploads = Uploads(settings, lock)
    if uploads.has_checkpoints:
        assert given.save is not None
        for folder in pending_in(given.local(given.save)):
            if folder.resolve() not in (path.resolve() for path in damaged):
                uploads.add_checkpoint(folder)
    try:
        yield uploads
    except Exception:
        uploads.close(LAST_SECONDS)
        raise
    finally:
        uploads.close(0)
