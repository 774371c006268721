"""Weights by broadcast over gloo, in a process group for each engine."""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from miles.engine.base import WeightChunk
from miles.weight_sync.transport import Delivery, WeightReceiver, stream

JOIN_TIMEOUT = timedelta(seconds=120)  # of both forming a group and one broadcast


@dataclass(frozen=True)
class _Group:
    """The sender's end: rank 0 of one engine's group."""

    name: str
    store: dist.TCPStore  # lives as long as the group
    ranks: dist.ProcessGroupGloo

    def broadcast(self, chunk: WeightChunk) -> None:
        """Send every tensor, in order. Raises ``RuntimeError`` when a peer is gone or ``JOIN_TIMEOUT`` passes."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        send = self.ranks.broadcast  # type: ignore[attr-defined]  # it is there; torch's stubs lack it
        sent = [send([tensor.contiguous()], options) for tensor in chunk.tensors.values()]
        for work in sent:
            work.wait()


class BroadcastTransport:
    """Groups are formed at an engine's first update and kept. A group each, so that one engine's death is its own.

    The engine's reply and the broadcast are awaited together: when an engine refuses, or dies, its update ends with the
    error at once, and the sender does not wait for a peer that will never receive.
    """

    def __init__(self) -> None:
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
        for url in delivery.failures:
            self._groups.pop(url, None)  # out of step with its engine: the next update forms another

    async def _begin(self, receiver: WeightReceiver) -> None:
        if receiver.url not in self._groups:
            self._groups[receiver.url] = await _form_group(receiver)
        await receiver.begin_update()


async def _form_group(receiver: WeightReceiver) -> _Group:
    name = f"weights-{uuid.uuid4().hex}"
    host = _address_towards(receiver.url)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=JOIN_TIMEOUT)

    def connect() -> dist.ProcessGroupGloo:
        # The prefixes under which torch.distributed, on the engine's side, looks for its peers: the engine's own, that
        # of a named group, and that of the device (distributed_c10d._new_process_group_helper).
        scope = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        return dist.ProcessGroupGloo(scope, 0, 1 + receiver.num_ranks, JOIN_TIMEOUT)

    _, ranks = await _both(receiver.join_group(host, store.port, name), asyncio.to_thread(connect))
    return _Group(name, store, ranks)


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
