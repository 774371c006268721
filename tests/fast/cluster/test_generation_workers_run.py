"""``train.py --num-rollout-workers`` with real Ray, against a stand-in server."""

import asyncio

from transformers import AutoConfig

from tests.fast.engine.answering_server import AnsweringServer


async def test_a_run_generates_in_two_processes_and_leaves_none(launch, tiny_model):
    """The workers are placed beside the rollout process. Each iteration has all of its 16 trajectories."""
    server = AnsweringServer(AutoConfig.from_pretrained(tiny_model).vocab_size)
    address = await server.start()
    try:
        flags = ["--rollout-engine", "sglang", "--rollout-external", "--rollout-external-engine-addrs", address]
        flags += ["--num-rollout-workers", "2", "--debug-rollout-only", "--num-rollout", "2"]
        run = launch("workers", *flags)
        assert await asyncio.to_thread(run.wait) == 0, run.err
        assert run.none_left()
    finally:
        await server.stop()
    assert server.asked.total() == 32 and max(server.asked.values()) == 1
