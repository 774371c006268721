"""Estimate how long counted work takes on a device: a range from the possible to the usual.

Every operation takes the longer of its arithmetic and its memory traffic (Williams et al., 2009). The short end has
operations at full speed, memory traffic beside matrix products hidden by fusion in the passes of the model, and
communication hidden behind computation. The long end has the efficiencies below, no fusion, and nothing hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles.commands.rehearsal.devices import Device
from miles.commands.rehearsal.record import Message, Phase, Tally

USUAL_PRODUCT = 0.5  # share of the data sheet's rate that matrix products of a training step reach
USUAL_MEMORY = 0.7
USUAL_LINK = 0.6


@dataclass(frozen=True)
class Seconds:
    """A range."""

    low: float
    high: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(self.low * factor, self.high * factor)

    def __str__(self) -> str:
        return f"{_short(self.low)} to {_short(self.high)} s"


NOTHING = Seconds(0.0, 0.0)


def seconds(tally: Tally, device: Device, phase: Phase) -> Seconds:
    """Return the time of the tally of ``phase``."""
    fuses = phase in (Phase.SCORE, Phase.TRAIN)  # the others have no products
    low = high = 0.0
    for work, count in tally.work.items():
        rate = (device.bf16 if work.itemsize == 2 else device.fp32) * 1e12
        arithmetic, memory = work.flops / rate, work.bytes / (device.bandwidth * 1e12)
        if work.flops or not fuses:
            low += count * max(arithmetic, memory)
        high += count * max(arithmetic / USUAL_PRODUCT, memory / USUAL_MEMORY)
    sending = communication(tally, device)
    return Seconds(max(low, sending.low), high + sending.high)


def communication(tally: Tally, device: Device) -> Seconds:
    """Return the time of a tally's collectives."""
    low = sum(
        count * message_bytes(message) / _speed(message.ranks, device) for message, count in tally.messages.items()
    )
    return Seconds(low, low / USUAL_LINK)


def message_bytes(message: Message) -> float:
    """Return what one rank sends of a collective, by the ring algorithm."""
    size, ranks = message.bytes, len(message.ranks)
    if "reduce_scatter" in message.name or "allgather" in message.name or "all_gather" in message.name:
        return size * (ranks - 1) / ranks
    if "allreduce" in message.name or "all_reduce" in message.name:
        return 2 * size * (ranks - 1) / ranks
    if "alltoall" in message.name or "all_to_all" in message.name:
        return size * (ranks - 1) / ranks
    return size  # point to point, broadcast


def crosses_nodes(ranks: Sequence[int], device: Device) -> bool:
    """Return whether ``ranks`` are on several nodes."""
    return len({rank // device.gpus_per_node for rank in ranks}) > 1


def _speed(ranks: Sequence[int], device: Device) -> float:
    """Return bytes per second of one rank. A ring over nodes is as fast as the adapters of all its GPUs in a node."""
    if not crosses_nodes(ranks, device):
        return device.link * 1e9
    nodes = {rank // device.gpus_per_node for rank in ranks}
    return min(device.link, device.network * len(ranks) / len(nodes)) * 1e9


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
