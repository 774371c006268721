"""Estimate how long counted work takes on a device: a range from the possible to the usual.

Every operation takes the longer of its arithmetic and its memory traffic (Williams et al., 2009). The short end has
operations at full speed, memory traffic alongside matrix products hidden by fusion in the passes of the model, and
communication hidden behind computation. The long end has the efficiencies below, no fusion, and nothing hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from miles.base import strict_json
from miles.base.flags import refuse
from miles.commands.rehearsal.meter import Message, OperationCounts, Phase
from miles.commands.rehearsal.trace import prompt_length, response_length
from miles.config.servers.passed_on import value_of
from miles.config.settings import Settings
from miles.models.packing import kv_bytes_per_token

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
        figures = strict_json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, strict_json.StrictJsonError) as error:
        refuse("rehearse_device", name, f"cannot be read ({error})", what_to_do)
    if not isinstance(figures, dict):
        refuse("rehearse_device", name, "is not a JSON object", what_to_do)
    base = figures.pop("base", None)
    unknown = figures.keys() - {f.name for f in fields(Device)}
    if unknown:
        refuse("rehearse_device", name, f"has unknown fields: {', '.join(sorted(unknown))}", what_to_do)
    wrong = [key for key, value in figures.items() if key != "name" and not _is_positive(value)]
    if wrong:
        refuse("rehearse_device", name, f"{', '.join(wrong)} must be numbers above 0", what_to_do)
    if base is not None:
        if not isinstance(base, str) or base not in KNOWN:
            refuse("rehearse_device", name, f"base {base!r} is not known", f"give one of {', '.join(KNOWN)}")
        return replace(KNOWN[base], **{"name": f"{KNOWN[base].name}, measured", **figures})
    missing = {f.name for f in fields(Device)} - {"gpus_per_node"} - figures.keys()
    if missing:
        refuse("rehearse_device", name, f"lacks {', '.join(sorted(missing))}", what_to_do)
    return Device(**figures)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


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
    sending = sum(count * message_bytes(sent) / _speed(sent.ranks, device) for sent, count in tally.messages.items())
    return Seconds(max(low, sending), high + sending / USUAL_LINK)


def message_bytes(message: Message) -> float:
    """Return what one rank sends of a collective, by the ring algorithm."""
    size, ranks = message.bytes, len(message.ranks)
    name = message.name.replace("_", "")
    if any(kind in name for kind in ("reducescatter", "allgather", "alltoall")):
        return size * (ranks - 1) / ranks
    if "allreduce" in name:
        return 2 * size * (ranks - 1) / ranks
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


# The needs of generation by arithmetic: engines run code that is not miles', so nothing of it is traced.


WORKSPACE = 3 << 30  # bytes of an engine's CUDA graphs, activations and libraries
MEMORY_SHARE = 0.9  # of a separate device that an engine takes for weights, KV cache and workspace
SHARED_SHARE = 0.8  # the same alongside a trainer that is in host memory

# SGLang's flags.
MEM_FRACTION = "--mem-fraction-static"  # the share of a device for weights and KV cache alone
MAX_RUNNING = "--max-running-requests"
CACHE_DTYPE = "--kv-cache-dtype"
_CACHE_ITEMSIZES = {"fp8_e5m2": 1, "fp8_e4m3": 1, "bf16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class GenerationEstimate:
    """What one engine needs, and how fast all of them can generate.

    Attributes:
        engines: How many there are; 0 if nothing is generated by this run.
        devices: Of one engine.
        weight_bytes: On one device.
        kv_bytes_per_token: On one device.
        cache_bytes: The KV cache on one device, as large as the memory allows and the requests need.
        sequences: In flight at one engine.
        tokens: Response tokens of an iteration.
        duration: Seconds of an iteration's generation.
    """

    engines: int
    devices: int
    weight_bytes: int
    kv_bytes_per_token: int
    cache_bytes: int
    sequences: int
    tokens: int
    duration: Seconds

    @property
    def device_bytes(self) -> int:
        """Bytes on one device, alongside the cache."""
        return self.weight_bytes + WORKSPACE if self.engines else 0


def foresee_generation(
    settings: Settings, config: dict[str, Any], parameters: int, active: int, device: Device, memory: float
) -> GenerationEstimate:
    """Compute the needs of the engines.

    Args:
        settings: All sections.
        config: The model's ``config.json``, its text part.
        parameters: Numbers in the whole model.
        active: The numbers that one token is multiplied with.
        device: Of the engines.
        memory: Bytes of one device.
    """
    engines = settings.num_engines or int(settings.generates)
    gpus = settings.sglang.rollout_num_gpus_per_engine if settings.num_engines else 1
    itemsize = 2 if settings.training.bf16 else 4
    weights = itemsize * parameters // gpus
    words = settings.server_flags.server
    per_token = kv_bytes_per_token(config, gpus, _CACHE_ITEMSIZES.get(value_of(words, CACHE_DTYPE) or "", itemsize))
    prompt, response = prompt_length(settings), response_length(settings)
    total = settings.trajectories_per_iteration
    in_flight = max(1, -(-total // max(1, engines)))
    if settings.num_engines:
        in_flight = min(in_flight, settings.sglang.sglang_server_concurrency)
    most = value_of(words, MAX_RUNNING)
    if most is not None:
        in_flight = min(in_flight, int(most))
    room = max(0, int(memory_for_tensors(settings, memory)) - weights)
    length = prompt + response
    running = min(in_flight, room // max(1, per_token * length)) if engines else 0
    cache = min(room, in_flight * length * per_token) if engines else 0
    duration = NOTHING
    if running:
        waves = -(-total // (engines * running))
        rate = device.bf16 if settings.training.bf16 else device.fp32
        duration = _decode(weights, per_token, running, prompt, response, active / gpus, device, rate) * waves
    elif engines:
        duration = Seconds(float("inf"), float("inf"))
    return GenerationEstimate(engines, gpus, weights, per_token, cache, running, total * response, duration)


def memory_for_tensors(settings: Settings, memory: float) -> float:
    """Return the bytes of a device that an engine has for its weights and its KV cache."""
    share = value_of(settings.server_flags.server, MEM_FRACTION)
    if share is not None:
        return memory * float(share)
    return memory * (SHARED_SHARE if settings.cluster.colocate else MEMORY_SHARE) - WORKSPACE


def _decode(
    weights: int, per_token: int, running: int, prompt: int, response: int, active: float, device: Device, rate: float
) -> Seconds:
    """Return the time in which ``running`` sequences grow from prompt to response, in step, at ``rate`` TFLOP/s."""
    cache = per_token * running * (prompt + response / 2)
    memory = response * (weights + cache) / (device.bandwidth * 1e12)
    arithmetic = 2 * active * running * response / (rate * 1e12)
    prefill = 2 * active * running * prompt / (rate * 1e12)
    low = max(memory, arithmetic) + prefill
    high = max(memory / USUAL_MEMORY, arithmetic / USUAL_PRODUCT) / USUAL_LINK + prefill / USUAL_PRODUCT
    return Seconds(low, high)


def sync_seconds(settings: Settings, parameters: int, engines: int, device: Device) -> Seconds | None:
    """Return the time in which all engines get new weights; None if files carry these, at the unknown speed of a disk.

    Trainer ranks gather the weights, rank 0 copies them to its host, and from there they reach the engines. Each of
    these ways is assumed to be as fast as a network adapter, which has the bandwidth of the bus behind it.
    """
    sglang = settings.sglang
    if sglang.writes_deltas or (settings.engine.has_servers and sglang.writes_weights):
        return None
    size = (2 if settings.training.bf16 else 4) * parameters
    low = (1 + copies_sent(settings, engines)) * size / (device.network * 1e9)
    return Seconds(low, low / USUAL_LINK)


def copies_sent(settings: Settings, engines: int) -> int:
    """Return how often all weights leave the host of rank 0: once per engine in a broadcast, else once."""
    return engines if settings.engine.has_servers and settings.sglang.update_weight_transfer_mode == "broadcast" else 1
