"""The sending side of weight deltas: keep the weights that were sent last, and write what has changed since."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from miles.base.host.disk_faults import naming_disk
from miles.engine.weight_sync.delta_encoding import TensorChange, apply, bits_of, encode, inverse
from miles.engine.weight_sync.delta_files import (
    MAKE_ROOM,
    DeltaOffer,
    TensorRecord,
    checksum,
    identity_of,
    pool,
    write_changes,
    write_manifest,
)
from miles.types.weights import BUCKET_BYTES, PackedChunk, WeightChunk, pack

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
        self._kept: dict[str, Entry] = {}
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
            kept, base = self._kept, identity_of(self._records)
            self._kept, self._records, self._undo, self._before = {}, {}, {}, None  # until the update is complete
            self._remove_all_but_last()
            staging.mkdir(parents=True)
            compared: dict[str, _Compared] = {}
            files: dict[str, dict[str, int]] = {}
            fits = bool(kept)
            with pool() as threads:
                for number, chunk in enumerate(chunks):
                    of_chunk = _compare(kept, pack(chunk), threads)
                    fits = fits and all(of.fits for of in of_chunk.values())
                    changes = {name: of.change for name, of in of_chunk.items() if of.change is not None}
                    if fits and changes:
                        name = f"delta-{number:05d}.safetensors"
                        files[name] = write_changes(staging / name, changes)
                    # Without the changes, which may be views of the exported weights and keep them all in memory.
                    compared |= {name: replace(of, change=None) for name, of in of_chunk.items()}
            fits = fits and compared.keys() == kept.keys()
            self._kept = {name: kept[name] for name in compared}
            self._records = {name: of.record for name, of in compared.items()}
            if not fits:
                shutil.rmtree(staging)
                return None
            self._undo = {name: of.undo for name, of in compared.items() if of.undo is not None}
            self._before = base
            size = write_manifest(staging, base, self._records, files) + sum(file["bytes"] for file in files.values())
            self._last = staging.rename(folder)
            return DeltaOffer(
                str(self._last),
                base,
                identity_of(self._records),
                size,
                sum(data.nbytes for _, _, data in self._kept.values()),
                sum(len(change.values) for change in self._undo.values()),
                sum(prod(shape) for _, shape, _ in self._kept.values()),
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
                yield from map(PackedChunk, _in_buckets(self._kept))
                return
            if identity != self._before:
                raise RuntimeError("weights were asked for that are older than the two newest")
            for entries in _in_buckets(self._kept):
                yield PackedChunk({name: _undone(entry, self._undo.get(name)) for name, entry in entries.items()})

    def newest(self) -> Iterator[PackedChunk]:
        """Yield all weights of the last update, as ``whole`` does."""
        return self.whole(identity_of(self._records))

    def _remove_all_but_last(self) -> None:
        for folder in (*self._root.glob(".writing_delta_*"), *self._root.glob("delta_*")):  # also of earlier runs
            if folder != self._last:
                shutil.rmtree(folder)


def _compare(kept: dict[str, Entry], chunk: PackedChunk, threads: Executor) -> dict[str, _Compared]:
    """Compare a chunk with the weights ``kept``, and replace them by it."""
    compared = threads.map(lambda item: _compare_one(kept, *item), chunk.entries.items())
    return dict(zip(chunk.entries, compared, strict=True))


def _compare_one(kept: dict[str, Entry], name: str, entry: Entry) -> _Compared:
    dtype, shape, data = entry
    record = TensorRecord(dtype, shape, checksum(data))
    if name not in kept or kept[name][:2] != (dtype, shape):
        kept[name] = (dtype, shape, data.copy())
        return _Compared(record, None, None, fits=False)
    old, new = _bits(kept[name]), _bits(entry)
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
    before = (dtype, shape, data.copy())
    apply(undo, _bits(before))
    return before


def _bits(entry: Entry) -> np.ndarray:
    _, shape, data = entry
    return bits_of(data, data.nbytes // max(prod(shape), 1) or 1)


def _in_buckets(kept: dict[str, Entry]) -> Iterator[dict[str, Entry]]:
    bucket: dict[str, Entry] = {}
    size = 0
    for name, entry in kept.items():
        if bucket and size + entry[2].nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = entry
        size += entry[2].nbytes
    if bucket:
        yield bucket
