"""What passes through Ray's object store: the weights of an update, or where their delta is, and an iteration's images.

All weights are one object per chunk. A delta (miles/engine/weight_sync/disk.py) is in files; the object that is passed
on states where, and whom to ask for all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray

from miles.engine.weight_sync.deltas import DeltaOffer, OfferedWeights, whole_update
from miles.types.metrics import Metric
from miles.types.train_batch import TrainShard
from miles.types.weights import PackedChunk, WeightChunk, unpack

if TYPE_CHECKING:
    from miles.types.images import ImageTensors


@dataclass(frozen=True)
class UpdateWeights:
    """The weights of an update, as passed between processes.

    Attributes:
        packed: References to the chunks of all weights; none if there is a delta. Ray passes on the references in a
            list, and not the objects that they refer to.
        offer: The delta; None without one.
        trainer: The trainer's rank 0, an actor that has all weights of a delta until the export after the next.
    """

    packed: list[ray.ObjectRef[Any]]
    offer: DeltaOffer | None = None
    trainer: Any = None

    def opened(self) -> StoredWeights | OfferedWeights:
        """Return the weights in the form that an engine takes."""
        if self.offer is None:
            return StoredWeights(self.packed)
        result = self.offer.result

        def fetch() -> StoredWeights:
            # Not ``ray.get``, for the reason below.
            packed: list[ray.ObjectRef[Any]] = self.trainer.whole_weights.remote(result).future().result()
            return StoredWeights(packed)

        return OfferedWeights(self.offer, fetch)


def store_packed(chunks: Iterable[PackedChunk]) -> list[ray.ObjectRef[Any]]:
    """Put packed chunks into the object store, and return references to them."""
    return [ray.put(chunk) for chunk in chunks]


class StoredWeights:
    """Iterate over stored chunks. Each pass has one in memory at once.

    A pass blocks: it belongs into a thread of the engine's, not into the event loop.
    """

    def __init__(self, packed: list[ray.ObjectRef[Any]]) -> None:
        self._packed = packed
        self._bytes = 0  # of the last pass

    def metrics(self, load_seconds: float) -> dict[str, Metric]:
        """Return the bytes that each engine got, and the seconds."""
        return whole_update(self._bytes, load_seconds)

    def __iter__(self) -> Iterator[WeightChunk]:
        self._bytes = 0
        for reference in self._packed:
            # Not ``ray.get``, which warns in an asyncio actor, in whichever thread it is called.
            chunk: PackedChunk = reference.future().result()
            self._bytes += sum(data.nbytes for _, _, data in chunk.entries.values())
            yield unpack(chunk)


# The images of an iteration in Ray's object store: each prompt's once, whichever ranks train its samples.


def without_images(by_replica: Sequence[list[TrainShard]]) -> tuple[list[ImageTensors], list[list[TrainShard]]]:
    """Return the images of all prompts, and the shards with their numbers instead; ``with_images`` undoes this."""
    numbers: dict[ImageTensors, int] = {}
    numbered = [_replaced(shards, lambda image: numbers.setdefault(image, len(numbers))) for shards in by_replica]
    return list(numbers), numbered


def with_images(shards: Sequence[TrainShard], images: Sequence[ImageTensors]) -> list[TrainShard]:
    """Return the shards with ``images`` instead of their numbers."""
    return _replaced(shards, images.__getitem__)


def _replaced(shards: Sequence[TrainShard], by: Callable[[Any], Any]) -> list[TrainShard]:
    result = []
    for shard in shards:
        if shard.batch.images is not None:
            images = [None if image is None else by(image) for image in shard.batch.images]
            shard = replace(shard, batch=replace(shard.batch, images=images))
        result.append(shard)
    return result
