"""The groups of a broadcast, with real gloo groups: an engine that has restarted joins another one."""

import asyncio

import psutil
import pytest
import torch
import torch.distributed as dist

from miles.engine.weight_sync.broadcast import JOIN_TIMEOUT, BroadcastTransport, _address_towards
from miles.engine.weight_sync.transport import Delivery
from miles.types.weights import WeightChunk


class Receiver:
    """A ``WeightReceiver`` of one process, here; it knows the groups that it has joined."""

    num_ranks = 1

    def __init__(self, url):
        self.url = url
        self.groups = {}
        self.weights = {}

    async def begin_update(self):
        pass

    async def end_update(self):
        pass

    async def join_group(self, host, port, group, backend):
        def join():
            store = dist.PrefixStore(f"{group}/", dist.PrefixStore(group, dist.TCPStore(host, port, is_master=False)))
            return dist.ProcessGroupGloo(dist.PrefixStore("cpu/", store), 1, 2, JOIN_TIMEOUT)

        self.groups[group] = await asyncio.to_thread(join)

    async def receive_broadcast(self, chunk, group, version, last):
        if group not in self.groups:  # as SGLang reports it
            raise RuntimeError(f"Group {group} not in {list(self.groups)}")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for name, tensor in chunk.tensors.items():
            self.weights[name] = torch.empty_like(tensor)
            await asyncio.to_thread(self.groups[group].broadcast([self.weights[name]], options).wait)


async def send(transport, *receivers, value):
    """Failures of sending weights full of ``value``."""
    delivery = Delivery(receivers)
    chunks = [WeightChunk({name: torch.full((3,), value)}) for name in ("a", "b")]
    await transport.send(delivery, chunks, 1)
    return delivery.failures


def holds(receiver, value):
    return {name: tensor.tolist() for name, tensor in receiver.weights.items()} == dict.fromkeys("ab", [value] * 3)


async def test_a_group_is_kept_from_update_to_update():
    transport, receiver = BroadcastTransport(torch.device("cpu")), Receiver("http://127.0.0.1:1")
    assert not await send(transport, receiver, value=1.0) and holds(receiver, 1.0)
    assert not await send(transport, receiver, value=2.0) and holds(receiver, 2.0)
    assert len(receiver.groups) == 1


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://127.0.0.1:3"])
async def test_an_engine_that_has_restarted_joins_another_group_and_the_old_one_goes(address):
    transport = BroadcastTransport(torch.device("cpu"))
    old, other = Receiver("http://127.0.0.1:1"), Receiver("http://127.0.0.1:2")
    assert not await send(transport, old, other, value=1.0)
    transport.forget_all_but({other.url})
    new = Receiver(address)
    assert not await send(transport, new, other, value=2.0)
    assert holds(new, 2.0) and holds(other, 2.0) and holds(old, 1.0)
    assert len(other.groups) == 1 and transport._groups.keys() == {address, other.url}


async def test_an_engine_that_nobody_knows_to_be_new_fails_once():
    transport, url = BroadcastTransport(torch.device("cpu")), "http://127.0.0.1:1"
    assert not await send(transport, Receiver(url), value=1.0)
    new = Receiver(url)
    assert "not in []" in str((await send(transport, new, value=2.0))[url])
    assert not await send(transport, new, value=3.0) and holds(new, 3.0)


async def test_the_group_of_an_engine_that_fails_is_left_before_the_others_have_their_weights():
    """Its broadcast holds up theirs, if they are on one GPU."""
    left = asyncio.Event()

    class Group:
        name = "group"

        def broadcast(self, chunk):
            pass

        def abandon(self):
            left.set()

    class HeldUp(Receiver):
        async def receive_broadcast(self, chunk, group, version, last):
            await asyncio.wait_for(left.wait(), 30)

    transport, failing, other = (
        BroadcastTransport(torch.device("cpu")),
        Receiver("http://127.0.0.1:1"),
        HeldUp("http://127.0.0.1:2"),
    )
    transport._groups |= {failing.url: Group(), other.url: Group()}
    assert (await send(transport, failing, other, value=1.0)).keys() == {failing.url}
    assert transport._groups.keys() == {other.url}


async def test_the_sender_listens_at_the_address_that_its_engine_sees_only(monkeypatch):
    """Store and group are at 127.0.0.3."""

    def listening():
        addresses = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
        return addresses.count("127.0.0.3"), addresses.count("::") + addresses.count("0.0.0.0")

    monkeypatch.setattr("miles.engine.weight_sync.broadcast._address_towards", lambda url: "127.0.0.3")
    before, everywhere = listening()
    transport, receiver = BroadcastTransport(torch.device("cpu")), Receiver("http://127.0.0.1:1")
    assert not await send(transport, receiver, value=1.0) and holds(receiver, 1.0)
    now, everywhere_now = listening()
    assert now == before + 2
    assert everywhere_now == everywhere


def test_the_address_towards_an_engine_with_ipv6():
    assert _address_towards("http://[::1]:30000") == "::1"
    assert _address_towards("http://127.0.0.1:30000") == "127.0.0.1"
