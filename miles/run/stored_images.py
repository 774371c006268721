"""The images of an iteration in Ray's object store: each prompt's once, whichever ranks train its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from miles.types.train_batch import TrainShard

if TYPE_CHECKING:
    from miles.types.images import ImageTensors


def without_images(by_replica: Sequence[list[TrainShard]]) -> tuple[list[ImageTensors], list[list[TrainShard]]]:
    """Return the images of all prompts, and the shards with their numbers instead; ``with_images`` undoes this."""
    numbers: dict[ImageTensors, int] = {}
    numbered = [_replaced(shards, lambda one: numbers.setdefault(one, len(numbers))) for shards in by_replica]
    return list(numbers), numbered


def with_images(shards: Sequence[TrainShard], images: Sequence[ImageTensors]) -> list[TrainShard]:
    """Return the shards with ``images`` instead of their numbers."""
    return _replaced(shards, images.__getitem__)


def _replaced(shards: Sequence[TrainShard], by: Callable[[Any], Any]) -> list[TrainShard]:
    found = []
    for shard in shards:
        if shard.batch.images is not None:
            images = [None if one is None else by(one) for one in shard.batch.images]
            shard = replace(shard, batch=replace(shard.batch, images=images))
        found.append(shard)
    return found
