"""Trainer and rollout of a run in one process."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from miles.config.rollout import RolloutArguments
from miles.run.one_process import drivers


class Worker:
    """Generates two iterations; the third waits for weights, which the engine refuses in the end."""

    def __init__(self, settings, placement):
        self.pipeline = self
        self.refuses = asyncio.Event()

    async def build(self, host):
        return 4

    async def generate(self, start):
        if start.iteration == 2:
            await asyncio.Event().wait()
        return f"iteration {start.iteration}", []

    async def update_weights(self, weights, version, after):
        await self.refuses.wait()
        raise ValueError("unknown parameters")

    async def close(self):
        pass


def test_an_iteration_does_not_wait_for_weights_that_are_refused(monkeypatch):
    monkeypatch.setattr(drivers, "RolloutActor", Worker)
    settings = SimpleNamespace(rollout=RolloutArguments(rollout_batch_size=1, async_steps=1), reads_samples=False)
    rollout, thread = drivers.OneProcessRollout(settings), ThreadPoolExecutor()
    try:
        assert rollout.generate(0).summary == "iteration 0"
        rollout.update_weights([], 1)
        assert rollout.generate(1).summary == "iteration 1"
        waiting = thread.submit(rollout.generate, 2)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        rollout._loop.call_soon_threadsafe(rollout._worker.refuses.set)
        assert str(waiting.exception(timeout=20)) == "unknown parameters"
    finally:
        rollout.close()
        thread.shutdown()
