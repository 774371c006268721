"""Broadcast weights in one process group per engine: over gloo, or over NCCL from a GPU (``broadcast``)."""

import asyncio
import os
import socket
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it too, untyped
from torch._C._distributed_c10d import TCPStore as TCPStore  # torch.distributed has it too, untyped

from miles.base.threads import in_thread
from miles.engine.weight_sync.transport import Delivery, Transport, WeightReceiver, stream
from miles.types.weights import WeightChunk

# Serve a torch TCP store at one address only: the ranks of a process group find each other by it.


def serve_store(host: str, timeout: timedelta) -> TCPStore:
    """Serve a store on a free port of ``host``.

    A store that opens its own socket listens on all interfaces, whatever ``host`` is, and takes reads and writes from
    everybody who can connect. This one is handed a socket that is bound to ``host``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=2048) as listener:
        port: int = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.fileno(),
        )
        listener.detach()  # the store closes it
    return store


JOIN_TIMEOUT = timedelta(seconds=120)  # for forming a group, and for one broadcast
COLLECTIVES = {"cpu": "gloo", "cuda": "nccl"}  # the library, by the device of the tensors


@dataclass(frozen=True)
class _Group:
    """The sender's end of one engine's group: its rank 0."""

    name: str
    store: TCPStore  # lives as long as the group
    ranks: Any  # ProcessGroupGloo or ProcessGroupNCCL; torch's stubs lack their broadcast
    device: torch.device

    def broadcast(self, chunk: WeightChunk) -> None:
        """Send every tensor in order. Raises ``RuntimeError`` if a peer is gone or ``JOIN_TIMEOUT`` passes."""
        broadcast(self.ranks, [tensor.to(self.device).contiguous() for tensor in chunk.tensors.values()])

    def abandon(self) -> None:
        """Leave the group. NCCL would otherwise wait for a lost peer forever and keep the device busy."""
        if self.device.type == "cuda":
            self.ranks.abort()


def broadcast(ranks: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Send ``tensors`` in order as rank 0 of the group ``ranks``, or receive them as another rank."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    for work in [ranks.broadcast([tensor], options) for tensor in tensors]:
        work.wait()
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()  # wait() only queues here; tensors must live until sent


class BroadcastTransport(Transport):
    """Broadcast to each engine in a separate group, so that an engine that dies disturbs no other.

    A group is formed at an engine's first update and kept. The engine's reply and the broadcast are awaited together:
    if an engine refuses or dies, its update ends with the error at once, and the sender does not wait for a peer that
    will never receive.
    """

    def __init__(self, device: torch.device) -> None:
        """Broadcast from ``device``: the CPU over gloo, or a GPU over NCCL.

        No engine may use that GPU: NCCL refuses two ranks on one device.
        """
        self._device = device
        self._groups: dict[str, _Group] = {}  # by URL

    async def send(self, delivery: Delivery, chunks: Iterable[WeightChunk], version: int) -> None:
        """Form the missing groups, then broadcast the chunks one after the other."""
        await delivery.each(self._begin)
        async for chunk, last in stream(chunks):

            async def broadcast(receiver: WeightReceiver, chunk: WeightChunk = chunk, last: bool = last) -> None:
                group = self._groups[receiver.url]
                try:
                    await _both(
                        receiver.receive_broadcast(chunk, group.name, version, last),
                        in_thread(group.broadcast, chunk),
                    )
                except Exception:
                    # At once, as the broadcast that nobody takes holds up those to the other engines on this GPU.
                    self._groups.pop(receiver.url).abandon()
                    raise

            await delivery.each(broadcast)
        await delivery.each(lambda receiver: receiver.end_update())
        # A group that failed is out of step with its engine: the next update forms another one.
        self.forget_all_but(self._groups.keys() - delivery.failures.keys())

    def forget_all_but(self, urls: Collection[str]) -> None:
        """Leave the groups of other engines. An engine that has restarted no longer knows its group."""
        for url in self._groups.keys() - set(urls):
            self._groups.pop(url).abandon()

    async def _begin(self, receiver: WeightReceiver) -> None:
        if receiver.url not in self._groups:
            self._groups[receiver.url] = await _form_group(receiver, self._device)
        await receiver.begin_update()


async def _form_group(receiver: WeightReceiver, device: torch.device) -> _Group:
    name = f"weights-{uuid.uuid4().hex}"
    host = _address_towards(receiver.url)
    store = serve_store(host, JOIN_TIMEOUT)

    def connect() -> Any:
        return join(store, name, 0, 1 + receiver.num_ranks, device, host)

    _, ranks = await _both(receiver.join_group(host, store.port, name, COLLECTIVES[device.type]), in_thread(connect))
    return _Group(name, store, ranks, device)


def join(store: TCPStore, name: str, rank: int, size: int, device: torch.device, host: str) -> Any:
    """Join the group ``name`` as ``rank``, which listens at ``host``.

    The prefixes are those under which an engine's torch.distributed looks for its peers: the engine's own, the one of a
    named group, and the one of the device (distributed_c10d._new_process_group_helper).

    Environment variables choose one interface for all groups of a process, and a run on one machine chooses the
    loopback interface. Its engines may be elsewhere, though (``--rollout-external``).
    """
    scope = PrefixStore(f"{device.type}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    match COLLECTIVES[device.type]:
        case "gloo":
            gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = JOIN_TIMEOUT
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            return dist.ProcessGroupGloo(scope, rank, size, gloo)
        case "nccl":
            if os.environ.get("NCCL_SOCKET_IFNAME") == "lo" and not ip_address(host).is_loopback:
                del os.environ["NCCL_SOCKET_IFNAME"]  # before this process's first group: NCCL reads it once
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = JOIN_TIMEOUT
            return dist.ProcessGroupNCCL(scope, rank, size, options)
        case unknown:
            raise AssertionError(f"{unknown} has no process group here")


async def _both(reply: Any, sent: Any) -> tuple[Any, Any]:
    """Return both results, or raise the first exception of either without waiting for the other."""
    tasks = [asyncio.ensure_future(reply), asyncio.ensure_future(sent)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in pending:
        task.cancel()
        # Its thread ends later, with a timeout error from gloo; the first error has been raised by then.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    for task in tasks:  # the reply first: it states why
        if task in done:
            task.result()
    return tasks[0].result(), tasks[1].result()


def _address_towards(url: str) -> str:
    """Return this host's address as the host of ``url`` sees it. Nothing is sent: UDP connect only looks up a route."""
    parts = urlsplit(url)
    family, kind, _, _, target = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
