"""A server whose devices are on several nodes: its processes start, stop and fail together."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch
from tolerance import SERVER_LOG_PROB_ERROR
from transformers import AutoModelForCausalLM

from miles.engine.base import GenerationRequest, LocalHost, SamplingParams, ServerFailed
from miles.engine.servers.engine import SpanningServer
from miles.engine.servers.launch import START_SECONDS, ServerOnHost
from miles.engine.servers.processes import LogFile
from miles.engine.sglang.launch import SglangProgram
from miles.types.weights import in_chunks
from tests.fast.engine.sglang_servers import KEYS, SMALL, engine_of, log_probs_of, other_weights


class Part:
    """A process of a node. With ``fails`` it fails when the others wait for it."""

    def __init__(self, node: int, fails: bool = False) -> None:
        self.name, self.node, self.fails = f"engine {node}", node, fails
        self.meetings: list[str | None] = []
        self.stopped = asyncio.Event()

    async def meeting_address(self) -> str:
        assert self.node == 0, "they meet at the first node"
        return "first:29"

    async def start(self, meeting: str | None = None) -> str:
        self.meetings.append(meeting)
        if self.fails:
            raise ServerFailed(f"node {self.node}")
        return f"http://node{self.node}"

    async def stop(self) -> None:
        self.stopped.set()

    async def update_copy(self, source: object) -> str:
        return f"copy of {source}"


class Waiting(Part):
    """A process that waits for the others until it is stopped."""

    async def start(self, meeting: str | None = None) -> str:
        await self.stopped.wait()
        raise ServerFailed("stopped")


async def test_all_processes_meet_at_the_first_which_answers():
    parts = [Part(node) for node in range(3)]
    server = SpanningServer(parts)
    assert await server.start() == "http://node0"
    assert [part.meetings for part in parts] == [["first:29"]] * 3
    assert await server.update_copy("weights") == "copy of weights"
    await server.stop()
    assert all(part.stopped.is_set() for part in parts)


async def test_a_process_that_does_not_start_ends_those_that_wait_for_it():
    parts = [Waiting(0), Part(1, fails=True), Waiting(2)]
    with pytest.raises(ServerFailed, match="node 1"):
        await asyncio.wait_for(SpanningServer(parts).start(), 60)
    assert all(part.stopped.is_set() for part in parts)


def test_only_processes_of_several_nodes_meet_at_an_address(tmp_path):
    one, second = (SglangProgram("m", "float32", "cpu", 2, seed=0, nodes=nodes, node=nodes - 1) for nodes in (1, 2))
    words = second.arguments("h", 1, "first:29")
    assert [words[words.index(flag) + 1] for flag in ("--nnodes", "--node-rank", "--dist-init-addr")] == [
        "2",
        "1",
        "first:29",
    ]
    assert "--nnodes" not in one.arguments("h", 1)
    method = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
    assert method in one.environment({}, tmp_path) and method not in second.environment({}, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_it_generates_and_takes_weights_as_the_model_does(tiny_model, tmp_path):
    """Two processes with a device each, instead of two nodes: tensor parallelism and a broadcast across them."""
    parts = []
    for node in range(2):
        spec = SglangProgram(tiny_model, "float32", "cpu", 2, seed=0, flags=SMALL, keys=KEYS, nodes=2, node=node)
        build = partial(ServerOnHost, spec, LogFile(tmp_path / f"{node}.log"))
        parts.append(LocalHost("cpu").place_server(0, build, START_SECONDS, node))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).requires_grad_(False)
    other = other_weights(model)
    engine = engine_of([SpanningServer(parts)], model.config.vocab_size, tmp_path, rollout_num_gpus_per_engine=2)
    try:
        await engine.start()
        request = GenerationRequest((5, 6, 7), (1,), SamplingParams(max_new_tokens=8))
        for version, weights in enumerate((model, other), start=1):
            await engine.update_weights(list(in_chunks(weights.named_parameters(), bucket_bytes=20_000)), version)
            (answer,) = await engine.generate(request)
            expected = log_probs_of(weights, request.prompt_ids, answer.token_ids)
            torch.testing.assert_close(
                torch.tensor(answer.log_probs).double(), expected, atol=SERVER_LOG_PROB_ERROR, rtol=0
            )
    finally:
        await engine.close()
