"""The rollout process's side of generation workers: what happens when one can no longer be talked to. Without Ray."""

import asyncio
import threading
from functools import partial

import pytest

from miles.engine.base import SamplingParams
from miles.rollout.groups import GroupSpec, response_seed
from miles.rollout.workers.pool import WorkerLost, WorkerPool
from miles.types.sample import Prompt, PromptGroup

SPEC = GroupSpec(SamplingParams(4), 1, partial(response_seed, 0))
SECONDS = 20


class Servers:
    """An engine that shows its servers."""

    def sender_config(self):
        return None

    async def share(self, senders):
        await senders.show("the servers")

    async def abort(self):
        pass


class Process:
    """A worker that takes everything in, and may answer what cannot be read."""

    def __init__(self, answer=None):
        self.answer, self.is_ended = answer, False

    async def prepare(self):
        pass

    async def deliver(self, sent):
        pass

    async def collect(self):
        if self.answer is None:
            await asyncio.Event().wait()
        return self.answer

    async def close(self):
        self.is_ended = True

    def kill(self):
        self.is_ended = True


@pytest.mark.parametrize("replaces", [True, False])
@pytest.mark.parametrize("fault", ["sent", "received"])
async def test_nobody_waits_for_a_worker_that_cannot_be_talked_to(fault, replaces):
    process = Process(b"no message" if fault == "received" else None)
    pool = WorkerPool(lambda number, _: process, 1, Servers(), replaces)
    await pool.start()
    metadata = {"lock": threading.Lock()} if fault == "sent" else {}
    group = PromptGroup(0, Prompt("1+1=", (1,), metadata=metadata))
    what = {"sent": "a prompt holds something that cannot be sent", "received": "what another process has sent"}
    with pytest.raises(ValueError, match=f"^--num-rollout-workers: {what[fault]}"):
        await asyncio.wait_for(pool.produce(group, SPEC), SECONDS)
    await asyncio.wait_for(pool.show("newer servers"), SECONDS)
    await asyncio.wait_for(pool.interrupt(), SECONDS)
    assert await asyncio.wait_for(pool.in_flight(), SECONDS) == 0
    assert process.is_ended
    await pool.close()


class Dies(Process):
    """A worker that is lost with its first groups."""

    async def deliver(self, sent):
        raise WorkerLost("died")

    async def collect(self):
        await asyncio.Event().wait()


class NeverReady(Process):
    """A worker that is being built."""

    async def prepare(self):
        await asyncio.Event().wait()


async def test_a_group_that_waits_for_a_worker_is_cancelled_when_the_pool_closes():
    processes = [Dies(), NeverReady()]
    starts = iter(processes)
    pool = WorkerPool(lambda number, _: next(starts), 1, Servers(), replaces=True)
    await pool.start()
    producing = asyncio.ensure_future(pool.produce(PromptGroup(0, Prompt("1+1=", (1,))), SPEC))
    while not pool._orders._waiting:
        await asyncio.sleep(0)
    await asyncio.wait_for(pool.close(), SECONDS)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(producing, SECONDS)
    assert all(process.is_ended for process in processes)
