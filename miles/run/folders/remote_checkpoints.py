"""Checkpoints in remote storage (``--save s3://bucket/run``), and the local copy through which a run sees them.

A run writes and reads checkpoints in the local copy, a folder as any other (training/checkpoint_folder.py). Beside
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
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from miles.base.remote_folder import RemoteError, RemoteFolder
from miles.config.checkpoint import CheckpointArguments, split_checkpoint
from miles.observe.tracking import run_header
from miles.observe.tracking.run_files import CONFIG, ENDED_EARLY, METRICS
from miles.run.folders.best_checkpoint import FILE_NAME as BEST
from miles.run.folders.best_checkpoint import best_in
from miles.training.checkpoint_files import DamagedFile, sync_tree, write_through
from miles.training.checkpoint_folder import ONLY_REMOTE, STATE, all_in, is_only_remote, iterations_of
from miles.training.checkpoint_manifest import MANIFEST, read_manifest
from miles.training.checkpoint_pruning import is_complete

UPLOADED = ".uploaded"  # in a local checkpoint: the remote folder has it too
INCOMPLETE = ".incomplete"  # in a remote checkpoint: it is being written or removed
RUN_FILES = (run_header.FILE_NAME, CONFIG, METRICS, ENDED_EARLY)  # of --output-dir, copied beside the checkpoints


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

    def remove_unfinished(self) -> list[str]:
        """Remove checkpoints whose upload or removal was interrupted, and return their names.

        Only the run that holds the lock of the remote folder may call it.

        Raises:
            RemoteError: The storage does not answer.
        """
        by_name = self._files_by_checkpoint()
        names = [name for name, files in by_name.items() if INCOMPLETE in files and MANIFEST not in files]
        for name in names:
            self._remove_files(name, by_name[name])
        return names

    def index(self) -> list[str]:
        """Make the local copy say what the remote folder holds, and return notes for the user.

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
        remote, records = self.remote.child(name), read_manifest(folder)
        if remote.read(MANIFEST) != manifest or _fault(folder, there) is not None:
            before_publishing()
            remote.write(INCOMPLETE, b"")
            remote.remove([MANIFEST, *(there.keys() - records.keys() - {INCOMPLETE})])  # one that this one replaces
            remote.upload(folder, records)
            sizes = remote.files()
            for file, record in records.items():
                if sizes.get(file) != record.bytes:
                    found = "is missing" if file not in sizes else f"has {sizes[file]} bytes"
                    raise RemoteError(f"{remote}: {file} {found} after its upload, not {record.bytes}")
            before_publishing()
            remote.write(MANIFEST, manifest)
        remote.remove([INCOMPLETE])
        self._seen.add(name)
        (folder / UPLOADED).touch()

    def upload_records(self, output_dir: Path) -> None:
        """Copy ``best.json`` and the small files of the run beside the checkpoints. Raises ``RemoteError``."""
        for place, names in ((self.local, (BEST,)), (output_dir, RUN_FILES)):
            self.remote.upload(place, [name for name in names if (place / name).is_file()])

    def restore_records(self, output_dir: Path) -> None:
        """Copy the metrics of the run to a machine that has none of its files. Raises ``RemoteError``."""
        if any((output_dir / name).exists() for name in RUN_FILES):
            return
        for name in (METRICS, run_header.FILE_NAME):  # run.json says whose metrics they are
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
        found: dict[str, dict[str, int]] = {}
        for path, size in self.remote.files(self._only or "").items():
            name, slash, file = path.partition("/")
            if slash and _is_name(name):
                found.setdefault(name, {})[file] = size
        return found

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
        """Forget what the remote folder has no more, and return notes on what it does not have yet."""
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
            later = json.loads(there or b"{}").get("iterations", -1)
        except (ValueError, AttributeError):
            return  # half-written: the next best replaces it
        known = best_in(self.local)
        if there is not None and isinstance(later, int) and (known is None or later >= known.iterations):
            write_through(self.local / BEST, there)


def index_all(checkpoint: CheckpointArguments, output_dir: Path) -> list[str]:
    """Make the local copies of ``--save`` and ``--load`` say what is in remote storage, and return notes for the user.

    The run must hold the lock of ``--save``. If it continues there on a machine that has none of its files, it gets its
    metrics back.

    Raises:
        ValueError: The storage does not answer; the message names the flag.
    """
    notes: list[str] = []
    save, load = checkpoint.urls.get("save"), checkpoint.urls.get("load")
    if save is not None:
        with named_errors(f"--save {save}"):
            found = RemoteCheckpoints.of(checkpoint, save)
            found.remove_unfinished()
            notes += found.index()
            if load is not None and _root(load) == _root(save) and not checkpoint.finetune:
                found.restore_records(output_dir)
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
    """Remove the files of a local checkpoint that the remote folder has too, but those that describe it."""
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
