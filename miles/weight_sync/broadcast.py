"""Weights by broadcast, over gloo or, from a GPU, over NCCL, in a process group for each engine."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from miles.weight_sync.transport import Delivery, WeightReceiver, stream
from miles.weights import WeightChunk

JOIN_TIMEOUT = timedelta(seconds=120)  # of both forming a group and one broadcast


@dataclass(frozen=True)
class _Group:
    """The sender's end: rank 0 of one engine's group."""

    name: str
    store: dist.TCPStore  # lives as long as the group
    ranks: Any  # ProcessGroupGloo or ProcessGroupNCCL; torch's stubs lack their broadcast
    device: torch.device

    def broadcast(self, chunk: WeightChunk) -> None:
        """Send every tensor, in order. Raises ``RuntimeError`` when a peer is gone or ``JOIN_TIMEOUT`` passes."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        tensors = [tensor.to(self.device).contiguous() for tensor in chunk.tensors.values()]
        sent = [self.ranks.broadcast([tensor], options) for tensor in tensors]
        for work in sent:
            work.wait()
        if self.device.type == "cuda":  # there, wait() only queues; the tensors must live until they are sent
            torch.cuda.current_stream(self.device).synchronize()

    def abandon(self) -> None:
        """Leave the group. NCCL would wait for a lost peer for ever, and keep the device busy."""
        if self.device.type == "cuda":
            self.ranks.abort()


class BroadcastTransport:
    """Groups are formed at an engine's first update and kept. A group each, so that one engine's death is its own.

    The engine's reply and the broadcast are awaited together: when an engine refuses, or dies, its update ends with the
    error at once, and the sender does not wait for a peer that will never receive.
    """

    def __init__(self, device: torch.device) -> None:
        """``device``: CPU for gloo. A GPU for NCCL, which no engine may use: NCCL refuses two ranks on one device."""
        self._device = device
        self._groups: dict[str, _Group] = {}  # by URL

    async def send(self, delivery: Delivery, chunks: Iterable[WeightChunk], version: int) -> None:
        await delivery.each(self._begin)
        async for chunk, last in stream(chunks):

            async def broadcast(receiver: WeightReceiver, chunk: WeightChunk = chunk, last: bool = last) -> None:
                group = self._groups[receiver.url]
                await _both(
                    receiver.receive_broadcast(chunk, group.name, version, last),
                    asyncio.to_thread(group.broadcast, chunk),
                )

            await delivery.each(broadcast)
        await delivery.each(lambda receiver: receiver.end_update())
        # One that failed is out of step with its engine: the next update forms another group.
        self.forget_all_but(self._groups.keys() - delivery.failures.keys())

    def forget_all_but(self, urls: Collection[str]) -> None:
        """An engine that starts anew, at the same address or another, knows nothing of its group."""
        for url in self._groups.keys() - set(urls):
            self._groups.pop(url).abandon()

    async def _begin(self, receiver: WeightReceiver) -> None:
        if receiver.url not in self._groups:
            self._groups[receiver.url] = await _form_group(receiver, self._device)
        await receiver.begin_update()


async def _form_group(receiver: WeightReceiver, device: torch.device) -> _Group:
    name = f"weights-{uuid.uuid4().hex}"
    host = _address_towards(receiver.url)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=JOIN_TIMEOUT)

    def connect() -> Any:
        # The prefixes under which torch.distributed, on the engine's side, looks for its peers: the engine's own, that
        # of a named group, and that of the device (distributed_c10d._new_process_group_helper).
        scope = dist.PrefixStore(f"{device.type}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        return _rank_zero(scope, 1 + receiver.num_ranks, device)

    backend = "nccl" if device.type == "cuda" else "gloo"
    _, ranks = await _both(receiver.join_group(host, store.port, name, backend), asyncio.to_thread(connect))
    return _Group(name, store, ranks, device)


def _rank_zero(scope: dist.PrefixStore, size: int, device: torch.device) -> Any:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(scope, 0, size, JOIN_TIMEOUT)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = JOIN_TIMEOUT
    return dist.ProcessGroupNCCL(scope, 0, size, options)


async def _both(reply: Any, sent: Any) -> tuple[Any, Any]:
    """The results of both, or the first exception of either, without waiting for the other."""
    tasks = [asyncio.ensure_future(reply), asyncio.ensure_future(sent)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in pending:
        task.cancel()
        # Its thread ends with an error of its own when gloo gives up, long after that one was told.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    for task in tasks:  # the reply first: it says why
        if task in done:
            task.result()
    return tasks[0].result(), tasks[1].result()


def _address_towards(url: str) -> str:
    """This host's address as seen from the host of ``url``. Nothing is sent: connecting UDP only looks up the route."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port))
        return probe.getsockname()[0]
