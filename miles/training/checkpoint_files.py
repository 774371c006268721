"""Files of a checkpoint or an export: write them through to the disk, and read the small ones without trusting them."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles.base.storage import PLACEHOLDER, is_inside
from miles.config.checkpoint import checkpoint_name


class DamagedFile(ValueError):
    """A file of a checkpoint is missing, or holds something other than what was saved. The message names the file."""


def write_through(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write ``data``, or its pieces, to ``path`` and return when it is on the disk."""
    with path.open("wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())


def use_umask(files: Iterable[Path]) -> None:
    """Give files the mode of other new files: safetensors 0.8 writes them for their owner alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    for file in files:
        file.chmod(0o666 & ~mask)


def sync(path: Path) -> None:
    """Return when a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Return when everything in ``folder`` is on the disk."""
    for path in folder.rglob("*"):
        if path.is_dir() or path.is_file():
            sync(path)
    sync(folder)


@contextmanager
def appearing_whole(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write into, which becomes ``folder`` when the block ends without an error.

    If ``folder`` exists, the new one replaces it by two renames, and gets its other files: all but weights and files of
    the names that the new one has. Whenever this is killed, the older or the new one is complete, in ``folder``, or in
    ``.replaced_*`` or ``.writing_*`` alongside it. The next call, or ``recover_exports``, puts it there.
    """
    folder = folder.resolve()  # a link stays, and its target is replaced
    _recover(folder)
    staged = _staged(folder)
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    yield staged
    sync_tree(staged)
    _put_in_place(folder)
    _recover(folder)


def _put_in_place(folder: Path) -> None:
    """Rename the staged folder to ``folder``; one that is there gets its ``.replaced_`` name."""
    staged, replaced = _staged(folder), _replaced(folder)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
        try:
            staged.rename(folder)
        except OSError:
            replaced.rename(folder)
            raise
    else:
        staged.rename(folder)
    sync(folder.parent)


def recover_exports(template: str) -> None:
    """Complete the exports of this name that a killed run has left behind, where ``{iteration}`` is any number.

    A half-written export stays until the next export of the same name, as another run may be writing it.
    """
    parts = PLACEHOLDER.split(str(Path(template).resolve()))
    pattern = re.compile(r"\d+".join(map(re.escape, parts)))
    parent = os.path.dirname("*".join(map(glob.escape, parts)))
    for name in glob.glob(f"{parent}/.replaced_*"):
        path = Path(name)
        exported = path.with_name(path.name.removeprefix(".replaced_"))
        if pattern.fullmatch(str(exported)):
            _recover(exported)


def _recover(folder: Path) -> None:
    """Finish what ``appearing_whole`` was killed in, so that ``folder`` is complete."""
    staged, replaced = _staged(folder), _replaced(folder)
    if not replaced.is_dir():
        return
    if not folder.exists():  # killed between the two renames, so the new one is complete
        (staged if staged.is_dir() else replaced).rename(folder)
        sync(folder.parent)
    if replaced.is_dir():
        for path in replaced.iterdir():
            is_weights = ".safetensors" in path.name and not path.is_dir()
            if not is_weights and not (folder / path.name).exists():
                path.rename(folder / path.name)
        sync(folder)
        shutil.rmtree(replaced)
        sync(folder.parent)


def _staged(folder: Path) -> Path:
    return folder.with_name(f".writing_{folder.name}")


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".replaced_{folder.name}")


def read_bytes(folder: Path, name: str) -> bytes:
    """Return the content of a file. Raises ``DamagedFile`` if it cannot be read or is empty."""
    try:
        data = (folder / name).read_bytes()
    except FileNotFoundError:
        raise DamagedFile(f"{name} is missing") from None
    except OSError as error:
        raise DamagedFile(f"{name} cannot be read ({error.strerror})") from None
    if not data:
        raise DamagedFile(f"{name} is empty")
    return data


def read_json_object(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in the file ``name`` in ``folder``. Raises ``DamagedFile`` for anything else."""
    data = read_bytes(folder, name)
    try:
        content = json.loads(data)
    except RecursionError:
        raise DamagedFile(f"{name} is not a JSON object (nested too deeply)") from None
    except ValueError as error:
        raise DamagedFile(f"{name} is not valid JSON ({in_one_line(error)})") from None
    if not isinstance(content, dict):
        raise DamagedFile(f"{name} is not a JSON object")
    return content


def in_one_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters, or the name of its type."""
    lines = str(error).split("\n")
    return "".join(c for c in lines[0][:200] if c.isprintable()) or type(error).__name__


# The manifest of a checkpoint: the size and the SHA-256 of each of its files.
#
# Each rank hashes the files that it wrote, when it has written them; the launcher hashes the rest and writes
# ``manifest.json``. Before a checkpoint is loaded, the launcher compares all its files with the manifest::
#
#     {"format": 1, "files": {"__0_0.distcp": {"bytes": 1234, "sha256": "…"}, "critic/state.json": …}}
#
# This finds accidents: a file that was cut, lost or overwritten. Whoever can write to the folder can also write
# another manifest (docs/checkpoints.md states what protects a reader from that).


MANIFEST = "manifest.json"
MAX_THREADS = 32  # more do not read faster from one host
_FORMAT = 1
_OF_RANK = re.compile(r"(?:__|random_state_rank)(\d+)[_.]")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileRecord:
    """The manifest's record of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class CheckCost:
    """The cost of a check against the manifest."""

    files: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.files} files, {self.bytes / 1e9:.3g} GB in {self.seconds:.1f} s"


def hash_files_of_rank(folder: Path, rank: int) -> dict[str, FileRecord]:
    """Return the records of the files that ``rank`` wrote into the checkpoint ``folder``, by their path in it."""
    return _hash_files(folder, [name for name in _names(folder) if _rank_of(name) == rank])


def write_manifest(folder: Path, known: Mapping[str, FileRecord]) -> None:
    """Write the manifest of the complete checkpoint ``folder``; files that ``known`` lacks are hashed here."""
    names = _names(folder)
    records = _hash_files(folder, [name for name in names if name not in known])
    files = {name: asdict(known.get(name) or records[name]) for name in names}
    write_through(folder / MANIFEST, json.dumps({"format": _FORMAT, "files": files}, indent=1).encode())


def has_manifest(folder: Path) -> bool:
    """Return whether ``folder`` has a manifest; checkpoints of earlier versions have none."""
    return (folder / MANIFEST).is_file()


def check_against_manifest(folder: Path, within: str | None = None) -> CheckCost:
    """Compare the files of the checkpoint ``folder``, or of its folder ``within`` alone, with its manifest.

    Raises:
        DamagedFile: If the manifest cannot be read or lists none of the files, or a file is missing, of another size,
            or has another hash.
    """
    start = time.perf_counter()
    records = read_manifest(folder) if within is None else check_lists(folder, within)
    for name, record in records.items():
        _check_size(folder, name, record.bytes)
    hashes = _hash_files(folder, records)
    for name, record in records.items():
        if hashes[name] != record:
            raise DamagedFile(f"{name} was altered (its SHA-256 is not the one in {MANIFEST})")
    return CheckCost(len(records), sum(record.bytes for record in records.values()), time.perf_counter() - start)


def check_lists(folder: Path, within: str) -> dict[str, FileRecord]:
    """Return the records of the files in the folder ``within``. Raises ``DamagedFile`` if there are none."""
    records = {name: record for name, record in read_manifest(folder).items() if Path(name).parts[0] == within}
    if not records:
        raise DamagedFile(f"{MANIFEST} lists no files in {within}")
    return records


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Return the records in the manifest of ``folder``. Raises ``DamagedFile`` if they are malformed."""
    manifest = read_json_object(folder, MANIFEST)
    if manifest.get("format") != _FORMAT:
        raise DamagedFile(f"{MANIFEST} has an unknown format ({str(manifest.get('format'))[:20]!r}, not {_FORMAT})")
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise DamagedFile(f"{MANIFEST} lists no files")
    return {name: _record(name, entry) for name, entry in files.items()}


def _record(name: str, entry: object) -> FileRecord:
    if not is_inside(name) or name.encode(errors="ignore").decode() != name:
        raise DamagedFile(f"{MANIFEST} names a file outside of the checkpoint ({name[:100]!r})")
    size, digest = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    if type(size) is not int or size < 0 or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise DamagedFile(f"{MANIFEST} has a malformed entry ({name[:100]!r})")
    return FileRecord(size, digest)


def _check_size(folder: Path, name: str, expected: int) -> None:
    try:
        size = (folder / name).stat().st_size
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise DamagedFile(f"{name} is missing" if missing else f"{name} cannot be read ({error.strerror})") from None
    if size == expected:
        return
    if size == 0:
        raise DamagedFile(f"{name} is empty")
    fault = "truncated" if size < expected else "too long"
    raise DamagedFile(f"{name} is {fault} ({size} bytes, {expected} were saved)")


def _hash_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Return the records of files, read in several threads: hashing lets go of Python's lock."""
    chosen = list(names)
    if not chosen:
        return {}
    threads = max(1, min(MAX_THREADS, os.cpu_count() or 1, len(chosen)))
    with ThreadPoolExecutor(threads, thread_name_prefix="hash-checkpoint") as pool:
        return dict(zip(chosen, pool.map(lambda name: _hash_file(folder, name), chosen), strict=True))


def _hash_file(folder: Path, name: str) -> FileRecord:
    try:
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileRecord(file.tell(), digest)
    except OSError as error:
        raise DamagedFile(f"{name} cannot be read ({error.strerror})") from None


def _names(folder: Path) -> list[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != MANIFEST)


def _rank_of(name: str) -> int:
    """Return the rank that wrote a file: the number in its name, or rank 0."""
    match = _OF_RANK.match(Path(name).name)
    return int(match[1]) if match else 0


# The folder of a run's checkpoints, and what each checkpoint of any backend holds besides tensors.
#
# ``--save`` has one folder per checkpoint. Each appears whole or not at all::
#
#     iter_0000004/        a checkpoint after 4 iterations
#         manifest.json        size and hash of every other file
#         state.json           which backend wrote it, the launcher's state, the learning rate's schedule
#         random_state_rank*.pt
#         critic/              model, optimizer and state.json of the critic, if there is one
#         reference/           model and state.json of a reference that follows the policy (--ref-update-interval)
#         …                    the backend's tensors
#     .writing_iter_…      being written
#     .removing_iter_…     being removed
#     .replaced_iter_…     was there before, until the new one is in place
#
# If ``--save`` is in remote storage (run/remote_checkpoints.py), this is the local copy of it. A checkpoint
# that is only there has the file ``.only-remote`` here, ``state.json`` and ``manifest.json``.


_NAME = re.compile(r"(\.replaced_)?iter_(\d{7})")
_UNFINISHED = re.compile(r"\.(writing_|removing_(\.replaced_)?)iter_\d{7}")
STATE = "state.json"
ONLY_REMOTE = ".only-remote"


def random_state_of(rank: int) -> str:
    """Return the name of the file with the random state of ``rank``."""
    return f"random_state_rank{rank}.pt"


def is_random_state(name: str) -> bool:
    """Return whether a file of a checkpoint has the random state of a rank."""
    return name.startswith("random_state_rank")


def staging(root: Path, iterations_done: int) -> Path:
    """Return an empty folder to write a checkpoint into; ``publish`` makes it one."""
    root.mkdir(parents=True, exist_ok=True)
    remove_unfinished(root)
    _remove_replaced(root)
    folder = staging_path(root, iterations_done)
    folder.mkdir()
    return folder


def publish(root: Path, iterations_done: int, known: Mapping[str, FileRecord] | None = None) -> Path:
    """Write the manifest and rename the staged folder to its final name: this one step makes a checkpoint appear.

    Everything is on the disk before the rename, and the rename when this returns, so that a crash of the machine leaves
    a complete checkpoint or none.

    Args:
        root: The folder of the run's checkpoints.
        iterations_done: Names the checkpoint.
        known: Records of files that are hashed already, by their path in the checkpoint.
    """
    staged, final = staging_path(root, iterations_done), checkpoint_path(root, iterations_done)
    write_manifest(staged, known or {})
    sync_tree(staged)
    _put_in_place(final)
    shutil.rmtree(_replaced(final), ignore_errors=True)
    sync(root)
    return final


def remove_unfinished(root: Path) -> None:
    """Remove the folders that a killed run has left half-written or half-removed in ``root``.

    Only the run that holds the lock of ``root`` (base/locks.py) may call it.
    """
    unfinished = [path for path in root.iterdir() if _UNFINISHED.fullmatch(path.name)] if root.is_dir() else []
    for path in unfinished:
        _remove_tree(path)


def _remove_replaced(root: Path) -> None:
    """Remove checkpoints whose replacements are in place: a run was killed in between."""
    for path in root.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None and match[1] is not None and (root / f"iter_{match[2]}").is_dir():
            shutil.rmtree(path)


def remove(folder: Path) -> None:
    """Remove a checkpoint. It disappears at once: if this is killed, the rest of it is no checkpoint."""
    removed = folder.with_name(f".removing_{folder.name}")
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    sync(folder.parent)
    _remove_tree(removed)


def _remove_tree(folder: Path) -> None:
    """Remove ``folder``. A thread that prunes may remove the same one meanwhile, so files may be gone already."""

    def ignore_gone(_: object, __: str, error: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(error[1], FileNotFoundError):
            raise error[1]

    shutil.rmtree(folder, onerror=ignore_gone)


def checkpoint_path(root: Path, iterations_done: int) -> Path:
    """Return the folder that ``publish`` makes a checkpoint."""
    return root / checkpoint_name(iterations_done)


def staging_path(root: Path, iterations_done: int) -> Path:
    """Return the folder that ``staging`` creates."""
    return _staged(checkpoint_path(root, iterations_done))


def bytes_being_written(root: Path) -> int | None:
    """Return the bytes of the next checkpoint in ``root`` that are written so far; None if none is being written."""
    size = None
    for folder in root.glob(".writing_iter_*"):
        with suppress(FileNotFoundError):  # the folder was renamed meanwhile: it is complete
            for path in folder.rglob("*"):
                with suppress(FileNotFoundError):  # only this file was renamed
                    size = (size or 0) + path.stat().st_size * path.is_file()
    return size


def at(path: Path) -> Path | None:
    """Return the checkpoint that ``path`` names: itself, or the newest in it; None for any other folder."""
    return path if is_checkpoint(path) else newest(path)


def newest(root: Path) -> Path | None:
    """Return the checkpoint of the most iterations in ``root``, or None if there is none.

    A run killed while it replaced a checkpoint has left the older one under its ``.replaced_`` name: it counts.
    """
    return next(reversed(all_in(root)), None)


def all_in(root: Path) -> list[Path]:
    """Return all checkpoints in ``root``, by their iterations, replaced ones before those that replace them."""
    if not root.is_dir():
        return []
    checkpoints = [
        (int(match[2]), match[1] is None, path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, _, path in sorted(checkpoints)]


def iterations_of(folder: Path) -> int | None:
    """Return the number of iterations in the name of a checkpoint; None for a folder of another name."""
    match = _NAME.fullmatch(folder.name)
    return None if match is None else int(match[2])


def is_checkpoint(folder: Path) -> bool:
    """Return whether ``folder`` is one checkpoint of a run, not a Hugging Face folder or a folder of checkpoints.

    A folder with the name of a checkpoint is one, however damaged.
    """
    if (folder / STATE).is_file():
        return True
    return _NAME.fullmatch(folder.name) is not None and folder.is_dir() and not (folder / "config.json").is_file()


def is_only_remote(folder: Path) -> bool:
    """Return whether the files of a checkpoint are in remote storage, and ``folder`` only describes them."""
    return (folder / ONLY_REMOTE).is_file()


def remote_fault(folder: Path) -> str | None:
    """Return why a checkpoint that is only in remote storage is not complete there, by its file sizes; None if it is.

    The file ``.only-remote`` has the words.
    """
    return (folder / ONLY_REMOTE).read_text(encoding="utf-8") or None


def critic_folder(folder: Path) -> Path:
    """Return the folder of the critic in the checkpoint ``folder``."""
    return folder / "critic"


def saved_critic(folder: Path) -> Path:
    """Return the same, to be read. Raises ``ValueError`` for a checkpoint of a run without a critic."""
    critic = critic_folder(folder)
    if not critic.is_dir():
        raise ValueError(
            f"--load {folder.parent}: {folder.name} has no critic, and --advantage-estimator ppo needs one; start from "
            "the model that --save-hf exported, as --hf-checkpoint, or load a checkpoint of a run with a critic"
        )
    return critic


def reference_folder(folder: Path) -> Path:
    """Return the folder of a reference that follows the policy in the checkpoint ``folder``."""
    return folder / "reference"


def is_reference(folder: Path) -> bool:
    """Return whether ``folder`` is the reference in a checkpoint, which has weights and no state of a run."""
    return folder == reference_folder(folder.parent)


def whole_of(folder: Path) -> Path:
    """Return the checkpoint that ``folder`` belongs to: itself, or the one that has it as its reference."""
    return folder.parent if is_reference(folder) else folder


def saved_reference(folder: Path, interval: int | None, reads_reference: bool) -> Path | None:
    """Return the reference in ``folder`` for a run to load; None if it starts from ``--ref-load``, as with a new flag.

    Args:
        folder: The checkpoint.
        interval: ``--ref-update-interval`` of this run.
        reads_reference: Whether this run has a reference.

    Raises:
        ValueError: The checkpoint's reference has followed the policy, and this run would compare with another one.
    """
    reference = reference_folder(folder)
    if not reference.is_dir():
        return None
    if interval is None and reads_reference:
        raise ValueError(
            f"--load {folder.parent}: the reference of {folder.name} has followed the policy, and this run would "
            f"compare with that of --ref-load; add --ref-update-interval, or give {reference} as --ref-load to a "
            "new run that starts from its weights with --finetune"
        )
    return reference if interval is not None else None


def write_run_state(folder: Path, backend: str, launcher: dict[str, Any], schedule: dict[str, Any]) -> None:
    """Write ``state.json``; rank 0 calls it. ``launcher`` and ``schedule`` must be plain JSON."""
    state = {"backend": backend, "launcher": launcher, "schedule": schedule, "manifest": True}
    write_through(folder / STATE, json.dumps(state).encode())


def read_state(folder: Path) -> dict[str, Any]:
    """Return what ``write_run_state`` wrote. Raises ``DamagedFile`` if it is malformed."""
    state = read_json_object(folder, STATE)
    launcher, schedule = read_launcher_state(folder), state.get("schedule")
    if not isinstance(schedule, dict):
        raise DamagedFile(f"{STATE} lacks the learning rate's schedule")
    for name, number in (
        ("rollouts_done", launcher.get("rollouts_done", 0)),
        ("steps_done", schedule.get("steps_done")),
    ):
        if type(number) is not int or number < 0:
            raise DamagedFile(f"{STATE} has a malformed {name} ({str(number)[:20]!r})")
    return state


def read_launcher_state(folder: Path) -> dict[str, Any]:
    """Return the launcher's part of ``state.json``. Raises ``DamagedFile`` if it is malformed."""
    launcher = read_json_object(folder, STATE).get("launcher")
    if not isinstance(launcher, dict):
        raise DamagedFile(f"{STATE} lacks the state of the run")
    return launcher


def read_run_state(folder: Path, backend: str, flag: str) -> dict[str, Any]:
    """Return what ``write_run_state`` wrote.

    Raises:
        ValueError: If it is malformed, or another backend wrote it; the message names ``flag``.
    """
    try:
        state = read_state(folder)
    except DamagedFile as fault:
        raise ValueError(f"{flag}: the checkpoint {folder} is damaged: {fault}; give another one") from None
    written_by = state.get("backend", "fsdp")
    if written_by != backend:
        raise ValueError(
            f"{flag}: the checkpoint {folder.name} was written by --train-backend {written_by}, whose format "
            f"--train-backend {backend} does not read; continue with {written_by}, or export its weights with "
            "--save-hf and start from them with --hf-checkpoint"
        )
    return state


# Choose the checkpoints of a run that stay, and remove the others (``--save-keep-last``, ``--save-retain-interval``).
#
# A checkpoint stays if it is one of the newest N complete ones, or if its iterations are a multiple of K. With only the
# interval, the newest complete one stays too. So a run always keeps one that it can resume from. Not counted and not
# removed are damaged checkpoints, checkpoints of more iterations than the one that was just saved (a run that resumed
# from an older one has passed them over as damaged), checkpoints that ``--ref-load`` and ``--opd-teacher-load`` name,
# and the best one.


def prune(saved: Path, keep_last: int | None, retain_interval: int | None, in_use: Collection[Path] = ()) -> None:
    """Remove the checkpoints alongside ``saved`` that are not kept, oldest first.

    Only the run that holds the lock of that folder may call it.

    Args:
        saved: The checkpoint that the run has just published.
        keep_last: How many of the newest complete checkpoints stay; None: one, if there is an interval.
        retain_interval: Checkpoints after a multiple of so many iterations stay too; None: none.
        in_use: Checkpoints that the run reads at every start, and the best one.

    Raises:
        OSError: A checkpoint cannot be removed.
    """
    if keep_last is None and retain_interval is None:
        return
    done = _iterations(saved)
    known = [folder for folder in all_in(saved.parent) if _iterations(folder) <= done]
    complete = [folder for folder in known if is_complete(folder)]
    for folder in complete[: -(keep_last or 1)]:
        is_used = folder.resolve() in (path.resolve() for path in in_use)
        if not is_used and (retain_interval is None or _iterations(folder) % retain_interval):
            remove(folder)


def _iterations(folder: Path) -> int:
    iterations = iterations_of(folder)
    assert iterations is not None, "a checkpoint of a run is named by its iterations"
    return iterations


def is_complete(folder: Path) -> bool:
    """Return whether every file of a checkpoint is there, or in remote storage, and has the size that was saved."""
    if is_only_remote(folder):
        return remote_fault(folder) is None
    try:
        for name, record in read_manifest(folder).items():
            _check_size(folder, name, record.bytes)
    except DamagedFile:
        return False
    return True
