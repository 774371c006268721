"""Estimate how long counted work takes on a device: a range from the possible to the usual.

Every operation takes the longer of its arithmetic and its memory traffic (Williams et al., 2009). The short end has
operations at full speed, memory traffic alongside matrix products hidden by fusion in the passes of the model, and
communication hidden behind computation. The long end has the efficiencies below, no fusion, and nothing hidden.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from miles.base import strict_json
from miles.base.flags import refuse
from miles.commands.rehearsal.meter import Message, OperationCounts, Phase

# The devices whose speed is assumed, from their makers' data sheets, or from a file of measured figures.


@dataclass(frozen=True)
class Device:
    """One accelerator in a node of eight.

    Attributes:
        name: Its name in the report.
        memory: GiB that PyTorch can use.
        bf16: Dense matrix products in bf16, TFLOP/s.
        fp32: The same in fp32, without TF32, TFLOP/s.
        bandwidth: Of its memory, TB/s.
        link: To a GPU of the same node, one way, GB/s.
        network: To another node, of one GPU, one way, GB/s.
        gpus_per_node: GPUs that ``link`` connects.
    """

    name: str
    memory: float
    bf16: float
    fp32: float
    bandwidth: float
    link: float
    network: float
    gpus_per_node: int = 8


# NVIDIA's data sheets of the SXM modules; network: one 200 or 400 Gbit/s adapter per GPU, as in DGX systems.
KNOWN: Mapping[str, Device] = {
    "a100": Device("A100 80 GB", 79.2, 312, 19.5, 2.04, 300, 25),
    "h100": Device("H100 80 GB", 79.1, 989, 67, 3.35, 450, 50),
    "h200": Device("H200 141 GB", 139.8, 989, 67, 4.8, 450, 50),
    "b200": Device("B200 180 GB", 178.3, 2250, 75, 7.7, 900, 50),
}


def device_of(name: str) -> Device:
    """Return the device that ``--rehearse-device`` names: one of ``KNOWN``, or a file with fields of ``Device``.

    A file may name a known device as ``base``, whose figures it replaces in part.

    Raises:
        FlagError: The file is no such description.
    """
    if name.lower() in KNOWN:
        return KNOWN[name.lower()]
    what_to_do = f"write a JSON object with {', '.join(f.name for f in fields(Device))}, or base and some of them"
    try:
        given = strict_json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, strict_json.StrictJsonError) as error:
        refuse("rehearse_device", name, f"cannot be read ({error})", what_to_do)
    if not isinstance(given, dict):
        refuse("rehearse_device", name, "is not a JSON object", what_to_do)
    base = given.pop("base", None)
    unknown = given.keys() - {f.name for f in fields(Device)}
    if unknown:
        refuse("rehearse_device", name, f"has unknown fields: {', '.join(sorted(unknown))}", what_to_do)
    wrong = [key for key, value in given.items() if key != "name" and not _is_positive(value)]
    if wrong:
        refuse("rehearse_device", name, f"{', '.join(wrong)} must be numbers above 0", what_to_do)
    if base is not None:
        if not isinstance(base, str) or base not in KNOWN:
            refuse("rehearse_device", name, f"base {base!r} is not known", f"give one of {', '.join(KNOWN)}")
        return replace(KNOWN[base], **{"name": f"{KNOWN[base].name}, measured", **given})
    missing = {f.name for f in fields(Device)} - {"gpus_per_node"} - given.keys()
    if missing:
        refuse("rehearse_device", name, f"lacks {', '.join(sorted(missing))}", what_to_do)
    return Device(**given)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def as_json(device: Device) -> str:
    """Return the text of a file that ``device_of`` reads."""
    return json.dumps(asdict(device), indent=2)


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


def seconds(tally: OperationCounts, device: Device, phase: Phase) -> Seconds:
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


def communication(tally: OperationCounts, device: Device) -> Seconds:
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
