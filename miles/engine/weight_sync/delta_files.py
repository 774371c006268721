"""The folder of a delta: the changes from one version of the weights to the next, with checksums of all weights.

::

    {"format": 1, "base": "…", "result": "…",
     "files": {"delta-00000.safetensors": {"bytes": 1234, "crc32": 5678}},
     "tensors": {"model.norm.weight": {"dtype": "bfloat16", "shape": [576], "crc32": 9012}}}

is ``delta.json`` in it. ``base`` and ``result`` identify the weights before and after: they are hashes of the names,
dtypes, shapes and checksums of all tensors, so that weights of another version, run or model have another identity.
The files hold a ``TensorChange`` (delta_encoding.py) of each tensor that has changed, in chunks.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from miles.base.strict_json import loads
from miles.engine.weight_sync.delta_encoding import TensorChange

MANIFEST = "delta.json"
MAKE_ROOM = "make room, or give another --update-weight-disk-dir"
_FORMAT = 1
_VALUES = "values"
MAX_THREADS = 8  # for checksums and comparisons, which release Python's lock; more wait for memory


class DeltaRefused(Exception):
    """Says why a host cannot follow a delta, so that it needs all weights."""


@dataclass(frozen=True)
class TensorRecord:
    """Identify the content of one tensor. ``dtype`` is torch's name; ``crc32`` is of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    crc32: int


Records = Mapping[str, TensorRecord]  # by name


def identity_of(records: Records) -> str:
    """Return what identifies weights of these contents."""
    listed = [[name, record.dtype, list(record.shape), record.crc32] for name, record in sorted(records.items())]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def checksum(data: np.ndarray) -> int:
    """Return the CRC-32 of contiguous bytes."""
    return zlib.crc32(data.data)


def pool() -> ThreadPoolExecutor:
    """Return the threads that checksums and comparisons of a pass share."""
    return ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="weight-delta")


@dataclass(frozen=True)
class DeltaOffer:
    """Announce a delta to those who hold the weights ``base``.

    Attributes:
        folder: The folder of its files, in a file system that the engines' hosts share.
        base: The identity of the weights before.
        result: The identity of the weights after.
        bytes: The size of its files.
        whole_bytes: The size of all weights.
        changed: How many elements have changed, of ``elements``.
        elements: How many elements the weights have.
        seconds: How long it took to find and write the changes.
    """

    folder: str
    base: str
    result: str
    bytes: int
    whole_bytes: int
    changed: int
    elements: int
    seconds: float


def write_changes(path: Path, changes: Mapping[str, TensorChange]) -> dict[str, int]:
    """Write the changes of a chunk; return size and checksum of the file."""
    arrays: dict[str, np.ndarray] = {}
    for name, change in changes.items():
        arrays[f"{change.form}/{name}"] = change.places
        arrays[f"{_VALUES}/{name}"] = change.values
    data = safetensors.numpy.save(arrays)
    path.write_bytes(data)
    return {"bytes": len(data), "crc32": zlib.crc32(data)}


def write_manifest(folder: Path, base: str, records: Records, files: Mapping[str, Mapping[str, int]]) -> int:
    """Write ``delta.json``, which completes the folder; return its size."""
    tensors = {name: asdict(record) for name, record in records.items()}
    manifest = {"format": _FORMAT, "base": base, "result": identity_of(records), "files": files, "tensors": tensors}
    return (folder / MANIFEST).write_text(json.dumps(manifest))


@dataclass(frozen=True)
class Delta:
    """A delta that is read and whole: the contents after it, and where its changes are."""

    folder: Path
    records: dict[str, TensorRecord]
    files: dict[str, dict[str, int]]

    def changes(self) -> Iterator[tuple[str, TensorChange]]:
        """Yield the changes by the names of their tensors, one file in memory at a time.

        Raises:
            DeltaRefused: A file is missing, cut or altered.
        """
        for name, expected in self.files.items():
            try:
                data = (self.folder / name).read_bytes()
            except OSError as error:
                raise DeltaRefused(f"{name} cannot be read: {error.strerror or error}") from error
            if len(data) != expected["bytes"]:
                raise DeltaRefused(f"{name} has {len(data)} bytes instead of {expected['bytes']}")
            if zlib.crc32(data) != expected["crc32"]:
                raise DeltaRefused(f"{name} has another checksum than delta.json says")
            yield from _changes_in(name, data)


def read_delta(offer: DeltaOffer) -> Delta:
    """Read ``delta.json`` of an offer, and check that it is what was offered.

    Raises:
        DeltaRefused: It is missing, damaged, or of other weights.
    """
    folder = Path(offer.folder)
    try:
        manifest = loads((folder / MANIFEST).read_text())
        records = records_of(manifest["tensors"])
        files = {str(name): {key: int(of[key]) for key in ("bytes", "crc32")} for name, of in manifest["files"].items()}
        found = (manifest["format"], manifest["base"], manifest["result"])
    except OSError as error:
        raise DeltaRefused(f"{MANIFEST} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DeltaRefused(f"{MANIFEST} is damaged: {error!r}") from error
    if found != (_FORMAT, offer.base, offer.result) or identity_of(records) != offer.result:
        raise DeltaRefused(f"{MANIFEST} describes other weights than were offered")
    if any(Path(name).name != name for name in files):
        raise DeltaRefused(f"{MANIFEST} names files outside of its folder")
    return Delta(folder, records, files)


def records_of(tensors: Mapping[str, Any]) -> dict[str, TensorRecord]:
    """Return the records in JSON. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for anything else."""
    return {
        name: TensorRecord(str(of["dtype"]), tuple(int(n) for n in of["shape"]), int(of["crc32"]))
        for name, of in tensors.items()
    }


def _changes_in(file: str, data: bytes) -> Iterator[tuple[str, TensorChange]]:
    try:
        arrays = safetensors.numpy.load(data)
    except SafetensorError as error:
        raise DeltaRefused(f"{file} is no safetensors file: {error}") from error
    for key, places in arrays.items():
        form, _, name = key.partition("/")
        if form != _VALUES:
            yield name, TensorChange(form, places, arrays[f"{_VALUES}/{name}"])
