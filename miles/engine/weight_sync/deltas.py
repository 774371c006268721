"""Weight deltas: the form of a tensor's changes, their folder, its writer, and the copies of hosts that follow it.

After an optimizer step with a small learning rate most bf16 weights are unchanged, because the step is less than half a
unit in their last place. Elements are compared and copied as bits, so NaNs, negative zeros and every dtype are exact.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from miles.base.disk_faults import naming_disk
from miles.base.processes import RUN_FOLDER
from miles.base.strict_json import loads
from miles.types.metrics import Metric
from miles.types.weights import BUCKET_BYTES, PackedChunk, WeightChunk, in_buckets, pack

GAPS, BITMAP, WHOLE = "gaps", "bitmap", "whole"


@dataclass(frozen=True)
class TensorChange:
    """Hold the changed elements of one tensor.

    Attributes:
        form: How ``places`` states which elements they are. ``gaps``: the distance of each from the one before it, and
            of the first from the start. ``bitmap``: one bit per element. ``whole``: all elements; ``places`` is empty.
        places: [changed] unsigned integers, or [ceil(elements / 8)] bytes.
        values: [changed] their new bits, as unsigned integers of the element's size.
    """

    form: str
    places: np.ndarray
    values: np.ndarray

    @property
    def nbytes(self) -> int:
        """The size of both arrays."""
        return self.places.nbytes + self.values.nbytes


def encode(old: np.ndarray, new: np.ndarray) -> TensorChange | None:
    """Return what has changed from ``old`` to ``new``, in the shortest form; None if nothing has.

    Args:
        old: [elements] bits of the tensor before.
        new: [elements] bits of the tensor now, of the same dtype.
    """
    assert old.shape == new.shape and old.dtype == new.dtype, "a tensor that has another shape or dtype is sent whole"
    differs = old != new
    positions = np.flatnonzero(differs)
    if not len(positions):
        return None
    gaps = np.diff(positions, prepend=0)
    gaps = gaps.astype(np.min_scalar_type(gaps.max()))
    bitmap_bytes = -(-len(new) // 8)
    if min(gaps.nbytes, bitmap_bytes) + len(positions) * new.itemsize >= new.nbytes:
        return TensorChange(WHOLE, np.empty(0, np.uint8), new)
    values = new[positions]
    if gaps.nbytes <= bitmap_bytes:
        return TensorChange(GAPS, gaps, values)
    return TensorChange(BITMAP, np.packbits(differs), values)


def apply(change: TensorChange, target: np.ndarray) -> None:
    """Write the changed elements into ``target`` [elements], which holds the old bits.

    Raises:
        ValueError: If the change belongs to no tensor of this size and dtype. ``target`` is as it was.
    """
    if change.values.dtype != target.dtype:
        raise ValueError(f"elements of {change.values.dtype} do not fit {target.dtype}")
    target[_places(change, len(target))] = change.values


def inverse(change: TensorChange, old: np.ndarray) -> TensorChange:
    """Return the change that leads back to ``old`` [elements]."""
    return TensorChange(change.form, change.places, old[_places(change, len(old))].copy())


def _places(change: TensorChange, count: int) -> np.ndarray | slice:
    """Return the indices of the changed elements of ``count``. Raises ``ValueError`` as ``apply`` does."""
    match change.form:
        case "gaps":
            positions = np.cumsum(change.places, dtype=np.int64)
        case "bitmap":
            if change.places.dtype != np.uint8 or len(change.places) != -(-count // 8):
                raise ValueError(f"a bitmap of {change.places.nbytes} bytes does not fit {count} elements")
            positions = np.flatnonzero(np.unpackbits(change.places)[:count])
        case "whole":
            if len(change.values) != count:
                raise ValueError(f"{len(change.values)} elements do not fit {count}")
            return slice(None)
        case unknown:
            raise ValueError(f"{unknown!r} is no form of a change")
    if len(positions) != len(change.values):
        raise ValueError(f"{len(positions)} places for {len(change.values)} values")
    if len(positions) and (positions[0] < 0 or positions[-1] >= count or (np.diff(positions) <= 0).any()):
        raise ValueError(f"places outside of {count} elements, or out of order")
    return positions


# The folder of a delta: the changes from one version of the weights to the next, with checksums of all weights.
#
# ::
#
#     {"format": 1, "base": "…", "result": "…",
#      "files": {"delta-00000.safetensors": {"bytes": 1234, "crc32": 5678}},
#      "tensors": {"model.norm.weight": {"dtype": "bfloat16", "shape": [576], "crc32": 9012}}}
#
# is ``delta.json`` in it. ``base`` and ``result`` identify the weights before and after: they are hashes of the names,
# dtypes, shapes and checksums of all tensors, so that weights of another version, run or model have another identity.
# The files hold a ``TensorChange`` of each tensor that has changed, in chunks.


MANIFEST = "delta.json"
MAKE_ROOM = "make room, or give another --update-weight-disk-dir"
_FORMAT = 1
_VALUES = "values"
MAX_THREADS = 8  # for checksums and comparisons, which release Python's lock; more wait for memory


class DeltaRefused(Exception):
    """States why a host cannot follow a delta, so that it needs all weights."""


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
        """Yield the changes by the names of their tensors, one file in memory at once.

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
        identity = (manifest["format"], manifest["base"], manifest["result"])
    except OSError as error:
        raise DeltaRefused(f"{MANIFEST} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DeltaRefused(f"{MANIFEST} is damaged: {error!r}") from error
    if identity != (_FORMAT, offer.base, offer.result) or identity_of(records) != offer.result:
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
    for key, positions in arrays.items():
        form, _, name = key.partition("/")
        if form != _VALUES:
            yield name, TensorChange(form, positions, arrays[f"{_VALUES}/{name}"])


# The sender of weight deltas: keep the weights that were sent last, and write what has changed since.


Entry = tuple[str, tuple[int, ...], np.ndarray]  # dtype name, shape, bytes; as in ``PackedChunk``


@dataclass(frozen=True)
class _Compared:
    """One tensor of an update: its content now, what has changed, and the way back.

    ``fits`` is False if there was no such tensor, or one of another dtype or shape.
    """

    record: TensorRecord
    change: TensorChange | None
    undo: TensorChange | None
    fits: bool


class DeltaWriter:
    """Write one delta per update into ``root``, in a folder that appears whole or not at all.

    Costs a copy of all weights in host memory. Engines may still be taking the update before the last one when the last
    is written: its files are kept, and its weights can be asked for (what has changed since is kept for that).
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._published: dict[str, Entry] = {}
        self._records: dict[str, TensorRecord] = {}
        self._undo: dict[str, TensorChange] = {}  # leads to the weights before, of identity ``_before``
        self._before: str | None = None
        self._number = 0
        self._last: Path | None = None  # the folder of the last delta
        self._lock = threading.Lock()  # ``whole`` is called while other work continues

    def update(self, chunks: Iterable[WeightChunk]) -> DeltaOffer | None:
        """Take new weights, and write what has changed.

        Returns:
            The delta; None if there are no weights to compare with, as in a run's first update, or if the tensors have
            other names, dtypes or shapes: everybody needs all weights then.

        Raises:
            WriteFailed: The disk is full. The next update has no weights to compare with.
        """
        began = time.perf_counter()
        self._number += 1
        folder = self._root / f"delta_{self._number:07d}"
        staging = folder.with_name(f".writing_{folder.name}")
        with self._lock, naming_disk(folder, staging, then=MAKE_ROOM):
            weights = self._published
            base = identity_of(self._records)
            self._published, self._records, self._undo, self._before = {}, {}, {}, None  # until the update is complete
            self._remove_all_but_last()
            staging.mkdir(parents=True)
            compared: dict[str, _Compared] = {}
            files: dict[str, dict[str, int]] = {}
            fits = bool(weights)
            with pool() as threads:
                for number, chunk in enumerate(chunks):
                    of_chunk = _compare(weights, pack(chunk), threads)
                    fits = fits and all(one.fits for one in of_chunk.values())
                    changes = {name: one.change for name, one in of_chunk.items() if one.change is not None}
                    if fits and changes:
                        name = f"delta-{number:05d}.safetensors"
                        files[name] = write_changes(staging / name, changes)
                    # Without the changes, which may be views of the exported weights and keep them all in memory.
                    compared |= {name: replace(one, change=None) for name, one in of_chunk.items()}
            fits = fits and compared.keys() == weights.keys()
            self._published = {name: weights[name] for name in compared}
            self._records = {name: one.record for name, one in compared.items()}
            if not fits:
                shutil.rmtree(staging)
                return None
            self._undo = {name: one.undo for name, one in compared.items() if one.undo is not None}
            self._before = base
            size = write_manifest(staging, base, self._records, files) + sum(file["bytes"] for file in files.values())
            self._last = staging.rename(folder)
            return DeltaOffer(
                str(self._last),
                base,
                identity_of(self._records),
                size,
                sum(data.nbytes for _, _, data in self._published.values()),
                sum(len(change.values) for change in self._undo.values()),
                sum(prod(shape) for _, shape, _ in self._published.values()),
                time.perf_counter() - began,
            )

    def whole(self, identity: str) -> Iterator[PackedChunk]:
        """Yield all weights of the last update, or of the one before it. The next update waits until all are consumed.

        Chunks are views of weights that the next update overwrites: copy each before asking for the next.

        Raises:
            RuntimeError: If neither has this ``identity``.
        """
        with self._lock:
            if identity == identity_of(self._records):
                yield from map(PackedChunk, _in_buckets(self._published))
                return
            if identity != self._before:
                raise RuntimeError("weights were asked for that are older than the two newest")
            for entries in _in_buckets(self._published):
                yield PackedChunk({name: _undone(entry, self._undo.get(name)) for name, entry in entries.items()})

    def newest(self) -> Iterator[PackedChunk]:
        """Yield all weights of the last update, as ``whole`` does."""
        return self.whole(identity_of(self._records))

    def _remove_all_but_last(self) -> None:
        for folder in (*self._root.glob(".writing_delta_*"), *self._root.glob("delta_*")):  # also of earlier runs
            if folder != self._last:
                shutil.rmtree(folder)


def _compare(weights: dict[str, Entry], chunk: PackedChunk, threads: Executor) -> dict[str, _Compared]:
    """Compare a chunk with the weights ``weights``, and replace them by it."""
    compared = threads.map(lambda item: _compare_one(weights, *item), chunk.entries.items())
    return dict(zip(chunk.entries, compared, strict=True))


def _compare_one(weights: dict[str, Entry], name: str, entry: Entry) -> _Compared:
    dtype, shape, data = entry
    record = TensorRecord(dtype, shape, checksum(data))
    if name not in weights or weights[name][:2] != (dtype, shape):
        weights[name] = (dtype, shape, data.copy())
        return _Compared(record, None, None, fits=False)
    old, new = _bits(weights[name][2], shape), _bits(data, shape)
    change = encode(old, new)
    if change is None:
        return _Compared(record, None, None, fits=True)
    undo = inverse(change, old)
    old[:] = new
    return _Compared(record, change, undo, fits=True)


def _undone(entry: Entry, undo: TensorChange | None) -> Entry:
    if undo is None:
        return entry
    dtype, shape, data = entry
    before = data.copy()
    apply(undo, _bits(before, shape))
    return dtype, shape, before


def _bits(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """View the bytes of a tensor of ``shape`` as unsigned integers, one per element."""
    return data.view(f"u{data.nbytes // max(prod(shape), 1) or 1}")


def _in_buckets(entries: dict[str, Entry]) -> Iterator[dict[str, Entry]]:
    return in_buckets(entries.items(), lambda entry: entry[2].nbytes, BUCKET_BYTES)


# The receiver of weight deltas: a host's own copy of all weights, as safetensors files.


_CONTENTS = "contents.json"  # is there while the files are whole; holds the fields of ``_Contents``
_LOCK = "lock"


class OtherWeights(RuntimeError):
    """All weights have arrived, and they are not those that were sent: a file was damaged on its way."""


@dataclass(frozen=True)
class WeightFolder:
    """A folder of safetensors files that hold all weights.

    Attributes:
        path: The folder, as the host that has it names it.
        nbytes: The bytes of the files: whoever reads them takes time in proportion.
    """

    path: str
    nbytes: int

    @classmethod
    def of(cls, folder: Path) -> WeightFolder:
        """Describe ``folder``, which is on this host."""
        return cls(str(folder), sum(path.stat().st_size for path in folder.glob("*.safetensors")))


@dataclass(frozen=True)
class CopySource:
    """Describe the source of new weights for a host's copy.

    Attributes:
        sent: Names this sending of the weights, so that the engines of a host copy them once.
        folder: All weights, as safetensors files; unless there is an ``offer``.
        offer: The changes.
        copies: The folder of copies on the host; None for the folder of temporary files.
        root: Distinguishes the run's copy from the copies of other runs.
        result: The identity of the weights in ``folder``; None if it is not known.
    """

    sent: str
    folder: str | None
    offer: DeltaOffer | None
    copies: str | None
    root: str
    result: str | None = None

    def update_copy(self) -> WeightFolder:
        """Bring the copy of this host up to date, and return it. Raises what ``follow`` and ``adopt`` raise."""
        copy = LocalCopy(copy_folder(self.copies, self.root))
        if self.offer is not None:
            copy.follow(self.offer)
        else:
            assert self.folder is not None, "a source has all weights or an offer"
            copy.adopt(chunks_in(Path(self.folder)), self.sent, self.result)
        return WeightFolder.of(copy.folder)


def copy_folder(copies: str | None, root: str) -> Path:
    """Return the folder of a run's copy on this host."""
    place = copies or os.environ.get(RUN_FOLDER) or tempfile.gettempdir()
    return Path(place) / f"weights-{os.getuid()}-{hashlib.sha256(root.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class _Contents:
    """The contents of a copy.

    Attributes:
        sent: Which sending of weights it is of.
        tensors: The content of each tensor.
        headers: The CRC-32 of the header of each file.
    """

    sent: str
    tensors: dict[str, TensorRecord]
    headers: dict[str, int]


class LocalCopy:
    """All weights in a folder that only this user may enter. Processes of one host may share it: they take turns.

    The copy records its contents while it is whole, and nothing while it changes. So a process that dies halfway leaves
    a copy that follows no delta and must be made again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def follow(self, offer: DeltaOffer) -> None:
        """Apply a delta, then compare every tensor with its checksum.

        Raises:
            DeltaRefused: This copy is not the base of the delta, or one of both is damaged. The copy may be lost.
            WriteFailed: This host's disk is full.
        """
        with self._alone():
            contents = self._contents()
            if contents is None:
                raise DeltaRefused("this host has no whole copy of the weights")
            is_there = identity_of(contents.tensors) == offer.result  # another engine of this host was here
            if not is_there and identity_of(contents.tensors) != offer.base:
                raise DeltaRefused("this host has other weights than those that the delta is of")
            tensors = self._map(contents.headers)
            (self.folder / _CONTENTS).unlink()
            if not is_there:
                contents = self._patch(tensors, contents, offer)
            if wrong := _wrong(tensors, contents.tensors):
                raise DeltaRefused(f"{len(wrong)} of {len(tensors)} tensors differ from their checksums ({wrong[0]})")
            self._note(contents)

    def _patch(self, tensors: dict[str, np.ndarray], contents: _Contents, offer: DeltaOffer) -> _Contents:
        """Apply a delta to ``tensors``; return the contents that the copy should have then. Raises ``DeltaRefused``."""
        delta = read_delta(offer)
        if _forms(contents.tensors) != _forms(delta.records):
            raise DeltaRefused("the delta is of tensors with other names, dtypes or shapes")
        for name, change in delta.changes():
            if name not in tensors:
                raise DeltaRefused(f"{name} is not among the weights")
            try:
                apply(change, _bits(tensors[name], delta.records[name].shape))
            except ValueError as error:
                raise DeltaRefused(f"{name}: {error}") from error
        return _Contents(offer.result, delta.records, contents.headers)

    def adopt(self, chunks: Iterable[WeightChunk], sent: str, result: str | None = None) -> None:
        """Replace the copy by ``chunks``, unless it has them already: ``sent`` names them.

        Raises:
            OtherWeights: They do not have the identity ``result``, if it is given. The copy is lost.
            WriteFailed: This host's disk is full.
        """
        from safetensors.torch import save_file  # not at the top: actors of servers import this module

        with self._alone(), self._naming_disk():
            contents = self._contents()
            if contents is not None and contents.sent == sent:
                return
            for old in (self.folder / _CONTENTS, *self.folder.glob("*.safetensors")):
                old.unlink(missing_ok=True)
            records: dict[str, TensorRecord] = {}
            headers: dict[str, int] = {}
            for number, chunk in enumerate(chunks):
                tensors = {name: tensor.contiguous() for name, tensor in chunk.tensors.items()}
                for name, (dtype, shape, data) in pack(WeightChunk(tensors)).entries.items():
                    records[name] = TensorRecord(dtype, shape, checksum(data))
                path = self.folder / f"model-{number:05d}.safetensors"
                save_file(tensors, path, {"format": "pt"})
                headers[path.name] = checksum(_header(np.memmap(path, np.uint8, "r")))
            if result is not None and identity_of(records) != result:
                raise OtherWeights(
                    f"the weights that have arrived on host {socket.gethostname()} are not those that the trainer has "
                    "sent; test the disks and the memory of both hosts, or give another --update-weight-disk-dir"
                )
            self._note(_Contents(sent, records, headers))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._naming_disk():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.folder.lstat().st_uid != os.getuid():
            raise PermissionError(f"{self.folder} is another user's; choose another --update-weight-copy-dir")
        with self._naming_disk():
            lock = (self.folder / _LOCK).open("w")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _naming_disk(self) -> AbstractContextManager[None]:
        what = f"the copy of the weights on host {socket.gethostname()}, {self.folder},"
        then = "make room, or give another --update-weight-copy-dir"
        return naming_disk(self.folder, what=what, then=then, failures=(OSError, SafetensorError))

    def _contents(self) -> _Contents | None:
        try:
            content = loads((self.folder / _CONTENTS).read_text())
            headers = {str(name): int(crc32) for name, crc32 in content["headers"].items()}
            return _Contents(str(content["sent"]), records_of(content["tensors"]), headers)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # also of another version of this code
            return None

    def _note(self, contents: _Contents) -> None:
        staged = self.folder / f".{_CONTENTS}"
        with self._naming_disk():
            staged.write_text(json.dumps(asdict(contents)))
            staged.rename(self.folder / _CONTENTS)

    def _map(self, headers: dict[str, int]) -> dict[str, np.ndarray]:
        """Map the bytes of every tensor into memory, writable; by name. Raises ``DeltaRefused`` for a damaged file."""
        tensors: dict[str, np.ndarray] = {}
        for name, crc32 in headers.items():
            try:
                data = np.memmap(self.folder / name, np.uint8, "r+")
                header = _header(data)
                whole = checksum(header) == crc32
            except (OSError, ValueError, struct.error) as error:
                raise DeltaRefused(f"this host's copy of the weights is damaged: {error}") from error
            entries = json.loads(header[8:].tobytes()) if whole else {}
            entries.pop("__metadata__", None)
            offsets = {tensor: entry["data_offsets"] for tensor, entry in entries.items()}
            if not whole or len(data) - len(header) != max((end for _, end in offsets.values()), default=0):
                raise DeltaRefused(f"this host's copy of the weights is damaged: {name}")
            content = np.asarray(data)[len(header) :]
            tensors |= {tensor: content[begin:end] for tensor, (begin, end) in offsets.items()}
        return tensors


def chunks_in(folder: Path) -> Iterator[WeightChunk]:
    """Yield the tensors of the safetensors files in ``folder``, file by file."""
    from safetensors.torch import load_file

    for path in sorted(folder.glob("*.safetensors")):
        yield WeightChunk(load_file(path))


def _header(data: np.ndarray) -> np.ndarray:
    """Return the header of a safetensors file: its length in 8 bytes, then JSON with the offsets of the tensors.

    Source: https://github.com/huggingface/safetensors. Raises ``struct.error`` for a file that is cut there.
    """
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    return np.asarray(data)[: 8 + length]


def _forms(records: Records) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (record.dtype, record.shape) for name, record in records.items()}


def _wrong(tensors: dict[str, np.ndarray], records: Records) -> list[str]:
    """Return the names of tensors that are missing, or whose bytes have another checksum than recorded."""
    if tensors.keys() != records.keys():
        return sorted(tensors.keys() ^ records.keys())
    with pool() as threads:
        checksums = dict(zip(tensors, threads.map(checksum, tensors.values()), strict=True))
    return [name for name, record in records.items() if checksums[name] != record.crc32]


# Weights that are announced as a delta, and fetched whole only by those who refuse it.


log = logging.getLogger(__name__)


def whole_update(num_bytes: int, load_seconds: float) -> dict[str, Metric]:
    """Return the metrics of an update that has sent all weights, in any mode."""
    return {"weight_sync/bytes": Metric(num_bytes), "weight_sync/load_seconds": Metric(load_seconds)}


@dataclass(eq=False)
class OfferedWeights:
    """Offer a delta. Iterating fetches all weights from the trainer, which blocks."""

    offer: DeltaOffer
    fetch: Callable[[], Iterable[WeightChunk]]
    refusals: int = 0  # how many have refused the delta

    def refuse(self, who: str, why: DeltaRefused) -> None:
        """Note that ``who`` needs all weights."""
        self.refusals += 1
        log.warning("%s gets all weights, because it cannot follow the delta: %s", who, why)

    def metrics(self, load_seconds: float) -> dict[str, Metric]:
        """Return the bytes sent, how much has changed, whether somebody has taken all weights, and the seconds."""
        offer, whole = self.offer, self.refusals > 0
        return {
            "weight_sync/bytes": Metric(offer.bytes + whole * offer.whole_bytes),
            "weight_sync/changed_fraction": Metric(offer.changed, offer.elements),
            "weight_sync/encode_seconds": Metric(offer.seconds),
            "weight_sync/whole": Metric(float(whole)),
            "weight_sync/load_seconds": Metric(load_seconds),
        }

    def __iter__(self) -> Iterator[WeightChunk]:
        yield from self.fetch()  # when the first chunk is asked for, which a thread does


@dataclass(frozen=True, eq=False)
class CopiedWeights:
    """The weights of an update by way of this host's copy, for an engine in this process.

    Each pass brings the copy up to date first, and blocks. ``weights`` are an offer or all weights; ``sent`` names
    them.
    """

    copy: LocalCopy
    weights: Iterable[WeightChunk]
    sent: str

    def __iter__(self) -> Iterator[WeightChunk]:
        follows = False
        result = None
        if isinstance(self.weights, OfferedWeights):
            result = self.weights.offer.result
            try:
                self.copy.follow(self.weights.offer)
                follows = True
            except DeltaRefused as refusal:
                self.weights.refuse("the engine", refusal)
        if not follows:  # not within ``except``: the refusal holds the old files, which take room until it is gone
            self.copy.adopt(self.weights, self.sent, result)
        yield from chunks_in(self.copy.folder)


def copied(weights: Iterable[WeightChunk], copies: str | None, shared: Path) -> CopiedWeights:
    """Return ``weights`` by way of this host's copy of those in ``shared``; ``copies`` is as in ``copy_folder``."""
    return CopiedWeights(LocalCopy(copy_folder(copies, str(shared))), weights, uuid.uuid4().hex)
