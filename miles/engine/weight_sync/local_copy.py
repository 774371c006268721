"""The receiving side of weight deltas: a host's own copy of all weights, as safetensors files."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import struct
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from miles.base.host.disk_faults import naming_disk
from miles.base.stacks import RUN_FOLDER
from miles.base.strict_json import loads
from miles.engine.weight_sync.delta_encoding import apply, bits_of
from miles.engine.weight_sync.delta_files import (
    DeltaOffer,
    DeltaRefused,
    Records,
    TensorRecord,
    checksum,
    identity_of,
    pool,
    read_delta,
    records_of,
)
from miles.types.weights import WeightChunk, pack

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
        copies: The folder of copies on the host; None for that of temporary files.
        root: Names the run's copy among those of other runs.
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
    """What a copy holds.

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

    The copy says what it holds while it is whole, and nothing while it changes. So a process that dies halfway leaves a
    copy that follows no delta and must be made again.
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
        """Apply a delta to ``tensors``; return what the copy should hold then. Raises ``DeltaRefused``."""
        delta = read_delta(offer)
        if _forms(contents.tensors) != _forms(delta.records):
            raise DeltaRefused("the delta is of tensors with other names, dtypes or shapes")
        for name, change in delta.changes():
            if name not in tensors:
                raise DeltaRefused(f"{name} is not among the weights")
            target = tensors[name]
            itemsize = target.nbytes // max(prod(delta.records[name].shape), 1) or 1
            try:
                apply(change, bits_of(target, itemsize))
            except ValueError as error:
                raise DeltaRefused(f"{name}: {error}") from error
        return _Contents(offer.result, delta.records, contents.headers)

    def adopt(self, chunks: Iterable[WeightChunk], sent: str, result: str | None = None) -> None:
        """Replace the copy by ``chunks``, unless it has them already: ``sent`` names them.

        Raises:
            OtherWeights: They are not those of the identity ``result``, if it is given. The copy is lost.
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

    def chunks(self) -> Iterator[WeightChunk]:
        """Yield the weights, one file in memory at a time."""
        return chunks_in(self.folder)

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
            found = loads((self.folder / _CONTENTS).read_text())
            headers = {str(name): int(crc32) for name, crc32 in found["headers"].items()}
            return _Contents(str(found["sent"]), records_of(found["tensors"]), headers)
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
            places = {tensor: entry["data_offsets"] for tensor, entry in entries.items()}
            if not whole or len(data) - len(header) != max((end for _, end in places.values()), default=0):
                raise DeltaRefused(f"this host's copy of the weights is damaged: {name}")
            content = np.asarray(data)[len(header) :]
            tensors |= {tensor: content[begin:end] for tensor, (begin, end) in places.items()}
        return tensors


def chunks_in(folder: Path) -> Iterator[WeightChunk]:
    """Yield the tensors of the safetensors files in ``folder``, one file at a time."""
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
        found = dict(zip(tensors, threads.map(checksum, tensors.values()), strict=True))
    return [name for name, record in records.items() if found[name] != record.crc32]
