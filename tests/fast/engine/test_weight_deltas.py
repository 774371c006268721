"""Servers that are sent deltas: one that restarts gets the weights of the others, and a full disk is named."""

import shutil
import signal
import socket
from pathlib import Path

import pytest
import torch
from small_disk import fill, mounted_disk

from miles.base.disk_faults import WriteFailed
from miles.engine.weight_sync.deltas import DeltaWriter, OfferedWeights, chunks_in
from miles.types.weights import WeightChunk, unpack
from tests.fast.engine.fake_servers import ask, started_engine

FULL = (
    f"^engine 0: the copy of the weights on host {socket.gethostname()}, {{disk}}/.*, was not written, because "
    "the disk tmpfs at {disk} .* is full; make room, or give another --update-weight-copy-dir"
)


async def weights_of(server):
    """Return the tensor in the folder that a server has loaded last."""
    folder = Path((await server.seen())["loaded"])
    return {n: t for chunk in chunks_in(folder) for n, t in chunk.tensors.items()}["w"].tolist()


async def test_a_server_that_restarts_follows_its_host_or_gets_all_weights(tmp_path):
    flags = {"update_weight_transfer_mode": "disk-delta", "use_fault_tolerance": True}
    writer = DeltaWriter(tmp_path / "weights")

    def export(value):
        offer = writer.update([WeightChunk({"w": torch.tensor([1.0, value])})])
        return OfferedWeights(offer, lambda: map(unpack, writer.whole(offer.result))) if offer else None

    export(0.0)
    async with started_engine(tmp_path, 1, updated=False, **flags) as (engine, (server,)):

        async def restart():
            starts = server.starts
            server.signal(signal.SIGKILL)
            answer = await ask(engine, (1, 2))  # waits for the new process
            assert server.starts > starts and answer.weight_version == 4
            return await weights_of(server)

        await engine.update_weights([unpack(chunk) for chunk in writer.newest()], 3)
        assert await weights_of(server) == [1.0, 0.0]
        chunks = export(5.0)
        await engine.update_weights(chunks, 4)
        assert await weights_of(server) == [1.0, 5.0] and chunks.refusals == 0
        assert await restart() == [1.0, 5.0] and chunks.refusals == 0, "its host has the weights"
        shutil.rmtree(server.copies)
        export(6.0)  # the trainer is ahead
        assert await restart() == [1.0, 5.0] and chunks.refusals == 1, "its host has lost them"


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_host_without_room_for_the_weights_ends_the_run(tmp_path, restarts):
    """No server is restarted for it: that makes no room."""
    flags = {"update_weight_transfer_mode": "disk-delta", "use_fault_tolerance": restarts}
    with mounted_disk(tmp_path / "disk") as disk:
        async with started_engine(tmp_path, 1, updated=False, **flags) as (engine, (server,)):
            server.copies = str(disk)
            fill(disk)
            with pytest.raises(WriteFailed, match=FULL.format(disk=disk)):
                await engine.update_weights([WeightChunk({"w": torch.zeros(2**15)})], 3)
            assert server.starts == 1


async def test_a_host_without_room_when_its_server_restarts_ends_the_run(tmp_path):
    """The server's restart is not tried again, and the sentence is not that no engine is left."""
    flags = {"update_weight_transfer_mode": "disk-delta", "use_fault_tolerance": True}
    with mounted_disk(tmp_path / "disk") as disk:
        async with started_engine(tmp_path, 1, updated=False, **flags) as (engine, (server,)):
            await engine.update_weights([WeightChunk({"w": torch.zeros(2**15)})], 3)
            server.copies = str(disk)  # as on another host
            fill(disk)
            server.signal(signal.SIGKILL)
            with pytest.raises(WriteFailed, match=FULL.format(disk=disk)):
                await ask(engine, (1, 2))
            assert server.starts == 2
