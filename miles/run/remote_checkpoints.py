"""Checkpoints in remote storage (``--save s3://bucket/run``), and the local copy through which a run sees them.

A run writes and reads checkpoints in the local copy, a folder as any other (training/checkpoint_files.py). Alongside
whole checkpoints it holds entries for those that are only in the remote folder: ``state.json``, ``manifest.json`` and
``.only-remote``. So identity, pruning and the best checkpoint are decided on one list, by the same code as ever::

    local copy                       remote folder
      .writing_iter_0000012
      iter_0000012  (being uploaded)   iter_0000012/ .incomplete, files…      not complete: no manifest
      iter_0000008  .uploaded          iter_0000008/ files…, manifest.json
      iter_0000004  .only-remote       iter_0000004/ files…, manifest.json
      best.json                        best.json, run.json, run.yaml, metrics.jsonl

A checkpoint is uploaded with its manifest last, and removed with its manifest first; ``.incomplete`` is there
meanwhile. So one without a manifest is never loaded, and may be removed if it has ``.incomplete``. Folders that another
program put there without a manifest have no such file, and stay.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from miles.base.disk_faults import WriteFailed
from miles.base.flags import count
from miles.base.locks import RemoteLock
from miles.base.storage import RemoteError, RemoteFolder, is_url
from miles.config.checkpoint import CheckpointArguments, split_checkpoint
from miles.config.settings import Settings
from miles.observe import run_files
from miles.observe.run_files import CONFIG, ENDED_EARLY, METRICS
from miles.run.best_checkpoint import FILE_NAME as BEST
from miles.run.best_checkpoint import BestCheckpoint, best_in, remove_superseded
from miles.training.checkpoint_files import (
    MANIFEST,
    ONLY_REMOTE,
    STATE,
    DamagedFile,
    all_in,
    is_complete,
    is_only_remote,
    iterations_of,
    read_manifest,
    remove,
    sync_tree,
    write_through,
)

UPLOADED = ".uploaded"  # in a local checkpoint: the remote folder has it too
INCOMPLETE = ".incomplete"  # in a remote checkpoint: it is being written or removed
RUN_FILES = (run_files.FILE_NAME, CONFIG, METRICS, ENDED_EARLY)  # of --output-dir, copied alongside the checkpoints


class RemoteCheckpoints:
    """A folder of checkpoints in remote storage with its local copy.

    Args:
        remote: The folder.
        local: The local copy.
        only: The name of the one checkpoint that is looked at; None: all.
    """

    def __init__(self, remote: RemoteFolder, local: Path, only: str | None = None) -> None:
        self.remote = remote
        self.local = local
        self._only = only
        # Remote checkpoints that the local copy lists, or listed before pruning: this run may remove them.
        self._seen = {path.name for path in _checkpoints(local) if is_only_remote(path) or (path / UPLOADED).is_file()}

    @classmethod
    def of(cls, checkpoint: CheckpointArguments, url: str) -> RemoteCheckpoints:
        """Return those at ``url``, a folder of checkpoints or a checkpoint in one; ``url`` is a value of a flag."""
        root, only = split_checkpoint(url)
        return cls(RemoteFolder(root, checkpoint.file_system_options), checkpoint.local(root), only)

    def remove_unfinished(self) -> None:
        """Remove checkpoints whose upload or removal was interrupted.

        Only the run that holds the lock of the remote folder may call it.

        Raises:
            RemoteError: The storage does not answer.
        """
        for name, files in self._files_by_checkpoint().items():
            if INCOMPLETE in files and MANIFEST not in files:
                self._remove_files(name, files)

    def index(self) -> list[str]:
        """Make the local copy list the contents of the remote folder, and return notes for the user.

        A whole local checkpoint that the remote folder lacks stays if it was never uploaded and is newer than all that
        are there: the run that saved it was stopped before its upload. Otherwise the remote folder is right: another
        machine has continued the run, or somebody has removed checkpoints.

        Raises:
            RemoteError: The storage does not answer.
        """
        by_name = self._files_by_checkpoint()
        names = [f"{name}/{small}" for name, files in by_name.items() for small in (STATE, MANIFEST) if small in files]
        contents = self.remote.read_all([*names, BEST])
        self.local.mkdir(parents=True, exist_ok=True)
        for name, files in by_name.items():
            small = {part: contents[f"{name}/{part}"] for part in (STATE, MANIFEST) if f"{name}/{part}" in contents}
            self._index_one(name, files, small)
        notes = self._drop_others(by_name.keys())
        self._index_best(contents.get(BEST))
        return notes

    def fetch(self, folder: Path) -> None:
        """Download a checkpoint of the local copy if it is only in the remote folder.

        Raises:
            DamagedFile: It is not complete there.
            RemoteError: The storage does not answer, or this machine cannot store the files.
        """
        if not is_only_remote(folder):
            return
        name = folder.name
        files = self._files_by_checkpoint().get(name)
        if files is None:
            raise DamagedFile("it is not in the remote folder any more")
        if INCOMPLETE in files and MANIFEST not in files:
            raise DamagedFile("its upload was not finished")
        print(f"note: {self.remote}: downloading {name} ({sum(files.values()) / 1e9:.3g} GB)", flush=True)
        try:
            self.remote.child(name).download(files.keys() - {INCOMPLETE}, folder)
        except FileNotFoundError as error:
            raise DamagedFile(f"{error} is missing") from None
        (folder / UPLOADED).touch()
        sync_tree(folder)
        (folder / ONLY_REMOTE).unlink()

    def upload(self, folder: Path, before_publishing: Callable[[], None]) -> None:
        """Copy a checkpoint of the local copy into the remote folder, its manifest last.

        Args:
            folder: The checkpoint.
            before_publishing: Called before the manifest makes it a checkpoint; raises if it must not become one.

        Raises:
            RemoteError: The storage cannot be written, or does not hold what was written.
            OSError: A local file cannot be read.
        """
        name = folder.name
        manifest = (folder / MANIFEST).read_bytes()
        there = self._files_by_checkpoint().get(name, {})
        remote = self.remote.child(name)
        records = read_manifest(folder)
        if remote.read(MANIFEST) != manifest or _fault(folder, there) is not None:
            before_publishing()
            remote.write(INCOMPLETE, b"")
            remote.remove([MANIFEST, *(there.keys() - records.keys() - {INCOMPLETE})])  # one that this one replaces
            remote.upload(folder, records)
            sizes = remote.files()
            for file, record in records.items():
                if sizes.get(file) != record.bytes:
                    fault = "is missing" if file not in sizes else f"has {sizes[file]} bytes"
                    raise RemoteError(f"{remote}: {file} {fault} after its upload, not {record.bytes}")
            before_publishing()
            remote.write(MANIFEST, manifest)
        remote.remove([INCOMPLETE])
        self._seen.add(name)
        (folder / UPLOADED).touch()

    def upload_records(self, output_dir: Path) -> None:
        """Copy ``best.json`` and the small files of the run alongside the checkpoints. Raises ``RemoteError``."""
        for place, names in ((self.local, (BEST,)), (output_dir, RUN_FILES)):
            self.remote.upload(place, [name for name in names if (place / name).is_file()])

    def restore_records(self, output_dir: Path) -> None:
        """Copy the metrics of the run to a machine that has none of its files. Raises ``RemoteError``."""
        if any((output_dir / name).exists() for name in RUN_FILES):
            return
        for name in (METRICS, run_files.FILE_NAME):  # run.json states whose metrics they are
            present = self.remote.read(name)
            if present is None:
                return
            output_dir.mkdir(parents=True, exist_ok=True)
            write_through(output_dir / name, present)

    def remove_others(self) -> None:
        """Remove the remote checkpoints that the local copy lists no more, and local files that are uploaded.

        The files of the newest checkpoint stay on this machine, for a restart.

        Raises:
            RemoteError: The storage cannot be written.
        """
        listed = _checkpoints(self.local)
        names = {folder.name for folder in listed}
        for name, files in self._files_by_checkpoint().items():
            if name in self._seen and name not in names:
                self._remove_files(name, files)
                self._seen.discard(name)
        whole = [folder for folder in listed if not is_only_remote(folder)]
        for folder in whole[:-1]:
            if (folder / UPLOADED).is_file():
                _leave_entry(folder)

    def _files_by_checkpoint(self) -> dict[str, dict[str, int]]:
        """Return the bytes of the files of each remote checkpoint, by its name and theirs."""
        by_name: dict[str, dict[str, int]] = {}
        for path, size in self.remote.files(self._only or "").items():
            name, slash, file = path.partition("/")
            if slash and _is_name(name):
                by_name.setdefault(name, {})[file] = size
        return by_name

    def _remove_files(self, name: str, files: Collection[str]) -> None:
        remote = self.remote.child(name)
        remote.write(INCOMPLETE, b"")
        remote.remove([MANIFEST])
        remote.remove([file for file in files if file not in (MANIFEST, INCOMPLETE)])
        remote.remove([INCOMPLETE])
        self.remote.remove_empty_folder(name)

    def _index_one(self, name: str, files: Mapping[str, int], small: Mapping[str, bytes]) -> None:
        """Make the local copy list a remote checkpoint of ``small`` files and others, with the given sizes."""
        folder = self.local / name
        is_published = MANIFEST in files
        if is_complete(folder) and not is_only_remote(folder):
            is_same = (folder / MANIFEST).read_bytes() == small.get(MANIFEST)
            if not is_published or is_same:
                is_whole_there = is_published and _fault(folder, files) is None
                _mark(folder, is_uploaded=is_whole_there)
                self._seen.add(name)
                return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / ONLY_REMOTE).write_text("its entry is not finished", encoding="utf-8")  # first: no other is listed
        for part, data in small.items():
            write_through(folder / part, data)
        (folder / ONLY_REMOTE).write_text(_fault(folder, files) or "", encoding="utf-8")
        self._seen.add(name)

    def _drop_others(self, names: Collection[str]) -> list[str]:
        """Forget checkpoints that left the remote folder, and return notes on those that it does not have yet."""
        notes = []
        newest = max(names, default="")
        for folder in _checkpoints(self.local):
            if folder.name in names or self._only not in (None, folder.name):
                continue
            if is_only_remote(folder) or (folder.name < newest and is_complete(folder)):
                shutil.rmtree(folder)
            elif is_complete(folder):
                _mark(folder, is_uploaded=False)
                notes.append(f"{self.remote}: {folder.name} is not there yet, and complete in {self.local}")
        return notes

    def _index_best(self, there: bytes | None) -> None:
        """Copy the record of the best checkpoint, unless the local one is of a later checkpoint."""
        try:
            iterations = json.loads(there or b"{}").get("iterations", -1)
        except (ValueError, AttributeError):
            return  # half-written: the next best replaces it
        known = best_in(self.local)
        if there is not None and isinstance(iterations, int) and (known is None or iterations >= known.iterations):
            write_through(self.local / BEST, there)


def index_all(checkpoint: CheckpointArguments, output_dir: Path) -> list[str]:
    """Make the local copies of ``--save`` and ``--load`` list the remote storage, and return notes for the user.

    The run must hold the lock of ``--save``. If it continues there on a machine that has none of its files, it gets its
    metrics back.

    Raises:
        ValueError: The storage does not answer; the message names the flag.
    """
    notes: list[str] = []
    save, load = checkpoint.urls.get("save"), checkpoint.urls.get("load")
    if save is not None:
        with named_errors(f"--save {save}"):
            checkpoints = RemoteCheckpoints.of(checkpoint, save)
            checkpoints.remove_unfinished()
            notes += checkpoints.index()
            if load is not None and _root(load) == _root(save) and not checkpoint.finetune:
                checkpoints.restore_records(output_dir)
    if load is not None and (save is None or _root(load) != _root(save)):
        with named_errors(f"--load {load}"):
            notes += RemoteCheckpoints.of(checkpoint, load).index()
    return notes


def _root(url: str) -> str:
    return split_checkpoint(url)[0]


@contextmanager
def named_errors(flag: str) -> Iterator[None]:
    """Raise ``ValueError`` that names ``flag`` and its value if remote storage fails."""
    try:
        yield
    except RemoteError as error:
        raise ValueError(f"{flag}: {error}; check the address, the credentials and the network") from error


def pending_in(local: Path) -> list[Path]:
    """Return the whole checkpoints in a local copy that are not in the remote folder yet, oldest first."""
    return [
        folder
        for folder in _checkpoints(local)
        if not is_only_remote(folder) and not (folder / UPLOADED).is_file() and is_complete(folder)
    ]


def _checkpoints(local: Path) -> list[Path]:
    return [folder for folder in all_in(local) if _is_name(folder.name)]


def _is_name(name: str) -> bool:
    """Return whether this is the name of a checkpoint, not of one that is being replaced."""
    return iterations_of(Path(name)) is not None and not name.startswith(".")


def _mark(folder: Path, is_uploaded: bool) -> None:
    if is_uploaded:
        (folder / UPLOADED).touch()
    else:
        (folder / UPLOADED).unlink(missing_ok=True)


def _leave_entry(folder: Path) -> None:
    """Remove the files of a local checkpoint that the remote folder has too, except the few that describe it."""
    (folder / ONLY_REMOTE).write_text("", encoding="utf-8")
    for path in list(folder.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (STATE, MANIFEST, ONLY_REMOTE):
            path.unlink()


def _fault(folder: Path, files: Mapping[str, int]) -> str | None:
    """Return why a remote checkpoint is not complete: its files and their bytes against its manifest in ``folder``."""
    if MANIFEST not in files:
        return "its upload was not finished" if INCOMPLETE in files else f"{MANIFEST} is missing"
    try:
        records = read_manifest(folder)
    except DamagedFile as fault:
        return str(fault)
    for file, record in records.items():
        if file not in files:
            return f"{file} is missing"
        if files[file] != record.bytes:
            return f"{file} has {files[file]} bytes, and {record.bytes} were saved"
    return None


# Upload checkpoints and exports during the run (``--save`` and ``--save-hf`` with a URL).
#
# One thread uploads what the run has written to this machine, in order. After a checkpoint it does the tasks due then:
# it records the best, prunes, and removes pruned checkpoints from the remote folder too. So nothing is removed there
# before something newer is complete there.
#
# An upload that fails, after the tries of ``RemoteFolder``, does not stop the run. Its files stay on this machine. It
# is tried again every ``AGAIN_SECONDS``, after the next save, and when the run ends; if that fails too, the run fails.


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
        section = settings.checkpoint
        self._settings = settings
        self._lock = lock
        self._remote = RemoteCheckpoints.of(section, section.save) if section.save and is_url(section.save) else None
        self._giving_up = threading.Event()
        if self._remote is not None:
            self._remote.remote.giving_up = self._giving_up
        self._changed = threading.Condition()
        self._waiting: list[_Upload] = []
        self._started = 0  # tries of uploads
        self._ended = 0  # the number of them that have ended
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
            WriteFailed: That try has failed too. The message states what is safe on this machine.
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
        section = self._settings.checkpoint
        last, interval = section.save_keep_last, section.save_retain_interval
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
        remote_sizes = remote.files()
        for name, size in sizes.items():
            if remote_sizes.get(name) != size:
                raise RemoteError(f"{remote}: {name} is not there as it was uploaded ({size} bytes)")
        shutil.rmtree(folder)

    def _notes_of_waiting(self) -> Iterator[None]:
        """Print, at most every ``NOTE_SECONDS``, the uploads that the run awaits. The caller advances it meanwhile."""
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
        first, section = self._waiting[0], self._settings.checkpoint
        more = f" and {count(len(self._waiting) - 1, 'later folder')}" if len(self._waiting) > 1 else ""
        if first.export is not None:
            what = f"--save-hf {first.export}: the export{more}"
        else:
            what = f"--save {section.save}: the checkpoint after {iterations_of(first.folder)} iterations{more}"
        return f"{what} is not uploaded, because {self._failure}; it is complete in {first.folder}"


@contextmanager
def uploading(settings: Settings, lock: RemoteLock | None, damaged: Collection[Path] = ()) -> Iterator[Uploads | None]:
    """Upload the block's checkpoints and exports, if a flag has a URL; first those left by an earlier run.

    Args:
        settings: The run, with its own folder as ``--save``.
        lock: The lock of that folder, if it is in remote storage.
        damaged: Checkpoints that were passed over.
    """
    section = settings.checkpoint
    if not section.urls.keys() & {"save", "save_hf"}:
        yield None
        return
    uploads = Uploads(settings, lock)
    if uploads.has_checkpoints:
        assert section.save is not None
        for folder in pending_in(section.local(section.save)):
            if folder.resolve() not in (path.resolve() for path in damaged):
                uploads.add_checkpoint(folder)
    try:
        yield uploads
    except Exception:
        uploads.close(LAST_SECONDS)
        raise
    finally:
        uploads.close(0)
