"""``train.py --num-rollout-workers`` with real Ray, with a simulated server."""

import asyncio

from transformers import AutoConfig

from tests.fast.engine.answering_server import AnsweringServer


async def test_a_run_generates_in_two_processes_until_a_reward_function_raises(launch, workplace, tiny_model):
    """Two iterations have all of their 16 trajectories. The error in the third names its prompt; no process is left."""
    server = AnsweringServer(AutoConfig.from_pretrained(tiny_model).vocab_size)
    address = await server.start()
    try:
        flags = ["--rollout-engine", "sglang", "--rollout-external", "--rollout-external-engine-addrs", address]
        flags += ["--num-rollout-workers", "2", "--debug-rollout-only", "--num-rollout", "3"]
        run = launch("workers", *flags, reward="raises", FAIL_AT="2")
        assert await asyncio.to_thread(run.wait) == 1, run.err
        assert run.none_left()
    finally:
        await server.stop()
    assert 32 < server.asked.total() <= 48 and max(server.asked.values()) == 1
    assert "KeyError: 'gold'" in run.err
    assert f"prompt {workplace / 'prompts.jsonl'}:" in run.err
    assert "--reward-error-value" in run.err
