"""The manifest of a checkpoint: the size and the SHA-256 of each of its files.

Each rank hashes the files that it wrote, when it has written them; the launcher hashes the rest and writes
``manifest.json``. Before a checkpoint is loaded, the launcher compares all its files with the manifest::

    {"format": 1, "files": {"__0_0.distcp": {"bytes": 1234, "sha256": "…"}, "critic/state.json": …}}

This finds accidents: a file that was cut, lost or overwritten. Whoever can write to the folder can also write another
manifest (docs/checkpoints.md says what protects a reader from that).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from miles.training.checkpoint_files import DamagedFile, read_json_object, write_through

MANIFEST = "manifest.json"
MAX_THREADS = 32  # more do not read faster from one host
_FORMAT = 1
_OF_RANK = re.compile(r"(?:__|random_state_rank)(\d+)[_.]")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class CheckCost:
    """What a check against the manifest took."""

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
    """Compare every file of the checkpoint ``folder`` with its manifest, or those of its folder ``within`` alone.

    Raises:
        DamagedFile: If the manifest cannot be read or lists none of the files, or a file is missing, of another size,
            or has another hash.
    """
    start = time.perf_counter()
    records = read_manifest(folder) if within is None else check_lists(folder, within)
    for name, record in records.items():
        _check_size(folder, name, record.bytes)
    found = _hash_files(folder, records)
    for name, record in records.items():
        if found[name] != record:
            raise DamagedFile(f"{name} was altered (its SHA-256 is not the one in {MANIFEST})")
    return CheckCost(len(records), sum(record.bytes for record in records.values()), time.perf_counter() - start)


def check_lists(folder: Path, within: str) -> dict[str, FileRecord]:
    """Return the records of the files in the folder ``within``. Raises ``DamagedFile`` if there are none."""
    records = {name: record for name, record in read_manifest(folder).items() if Path(name).parts[0] == within}
    if not records:
        raise DamagedFile(f"{MANIFEST} lists no files in {within}")
    return records


def check_sizes(folder: Path) -> int:
    """Compare the size of every file of the checkpoint ``folder`` with its manifest, without reading the files.

    Returns:
        The bytes of all files together.

    Raises:
        DamagedFile: If the manifest cannot be read, or a file is missing or of another size.
    """
    records = read_manifest(folder)
    for name, record in records.items():
        _check_size(folder, name, record.bytes)
    return sum(record.bytes for record in records.values())


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Return the records in the manifest of ``folder``. Raises ``DamagedFile`` if they are malformed."""
    found = read_json_object(folder, MANIFEST)
    if found.get("format") != _FORMAT:
        raise DamagedFile(f"{MANIFEST} has an unknown format ({str(found.get('format'))[:20]!r}, not {_FORMAT})")
    files = found.get("files")
    if not isinstance(files, dict) or not files:
        raise DamagedFile(f"{MANIFEST} lists no files")
    return {name: _record(name, entry) for name, entry in files.items()}


def _record(name: str, entry: object) -> FileRecord:
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or not _encodes(name):
        raise DamagedFile(f"{MANIFEST} names a file outside of the checkpoint ({name[:100]!r})")
    size, digest = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    if type(size) is not int or size < 0 or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise DamagedFile(f"{MANIFEST} has a malformed entry ({name[:100]!r})")
    return FileRecord(size, digest)


def _encodes(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


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
