"""Weights that are announced as a delta, and fetched whole only by those who refuse it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from miles.engine.weight_sync.delta_files import DeltaOffer, DeltaRefused
from miles.engine.weight_sync.local_copy import LocalCopy, copy_folder
from miles.types.metrics import Metric
from miles.types.weights import WeightChunk

log = logging.getLogger(__name__)


@runtime_checkable
class OffersDelta(Protocol):
    """An optional capability of the weights of an update: offer a delta to those who can follow it."""

    offer: DeltaOffer

    def refuse(self, who: str, why: DeltaRefused) -> None:
        """Note that ``who`` needs all weights."""
        ...


def whole_update(num_bytes: int, load_seconds: float) -> dict[str, Metric]:
    """Return the metrics of an update that has sent all weights, in any mode."""
    return {"weight_sync/bytes": Metric(num_bytes), "weight_sync/load_seconds": Metric(load_seconds)}


class OfferedWeights:
    """Offer a delta. Iterating fetches all weights from the trainer, which blocks."""

    def __init__(self, offer: DeltaOffer, fetch: Callable[[], Iterable[WeightChunk]]) -> None:
        self.offer = offer
        self.refusals = 0  # how many have refused the delta
        self._fetch = fetch

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
        yield from self._fetch()  # when the first chunk is asked for, which a thread does


class CopiedWeights:
    """The weights of an update by way of this host's copy, for an engine in this process.

    Each pass brings the copy up to date first, and blocks.
    """

    def __init__(self, copy: LocalCopy, weights: Iterable[WeightChunk], sent: str) -> None:
        """Use ``weights``, an offer or all weights; ``sent`` names them."""
        self._copy = copy
        self._weights = weights
        self._sent = sent

    def __iter__(self) -> Iterator[WeightChunk]:
        if not self._follows():
            result = self._weights.offer.result if isinstance(self._weights, OffersDelta) else None
            self._copy.adopt(self._weights, self._sent, result)
        yield from self._copy.chunks()

    def _follows(self) -> bool:
        """Return whether the copy has followed an offer."""
        if not isinstance(self._weights, OffersDelta):
            return False
        try:
            self._copy.follow(self._weights.offer)
        except DeltaRefused as refusal:
            self._weights.refuse("the engine", refusal)
            return False
        return True


def copied(weights: Iterable[WeightChunk], copies: str | None, shared: Path) -> CopiedWeights:
    """Return ``weights`` by way of this host's copy of those in ``shared``; ``copies`` is as in ``copy_folder``."""
    return CopiedWeights(LocalCopy(copy_folder(copies, str(shared))), weights, uuid.uuid4().hex)
