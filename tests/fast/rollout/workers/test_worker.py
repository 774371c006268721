"""Generation workers make and score the same trajectories as one process. Without Ray."""

import asyncio
import json
import shlex
import sys
import threading
from collections import Counter
from contextlib import asynccontextmanager

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import AutoConfig

from miles.base.user_code import UserCodeError
from miles.config.parser import parse
from miles.config.validate import validate
from miles.engine.base import LocalHost
from miles.rollout.ordering import Start
from miles.rollout.pipeline import build_pipeline
from miles.rollout.workers.worker import GenerationWorker, WorkerPlan, pickled
from miles.tasks.environments.base import Environment, opening
from miles.types.weights import WeightChunk
from tests.fast.engine.answering_server import AnsweringServer
from tests.fast.support.agent_program import CHAT

AGENT = (
    CHAT
    + """
row = json.load(sys.stdin)
messages = [{"role": "user", "content": row["input"]}]
chat([*messages, chat(messages), {"role": "user", "content": "7"}])
print(row["input"])
"""
)


class Twice(Environment):
    """Asks a second time, and pays the row's reward."""

    max_tokens = 4

    def __init__(self, prompt):
        self.prompt, self.answers = prompt, 0

    async def reset(self):
        return opening(self.prompt)

    async def step(self, answer):
        self.answers += 1
        return [] if self.answers == 2 else [{"role": "user", "content": "7"}]

    async def reward(self):
        return self.prompt.metadata["pays"]


async def cancels(trajectory):
    raise asyncio.CancelledError


async def forgets(trajectory):
    trajectory.sample.prompt.metadata.clear()
    await trajectory.generate()


async def keeps_a_lock(trajectory):
    trajectory.sample.prompt.metadata["lock"] = threading.Lock()
    await trajectory.generate()


class OwnProcess:
    """A worker on the test's event loop, as the pool sees one in a process."""

    def __init__(self, plan):
        self._plan = plan

    async def prepare(self):
        self._worker = GenerationWorker(self._plan)

    async def deliver(self, sent):
        self._worker.deliver(sent)

    async def collect(self):
        return await self._worker.collect()

    async def close(self):
        await self._worker.close()

    def kill(self):
        raise AssertionError("no worker is lost here")


@pytest.fixture
async def address(tiny_model):
    server = AnsweringServer(AutoConfig.from_pretrained(tiny_model).vocab_size)
    yield await server.start()
    await server.stop()


@pytest.fixture
def settings_of(tiny_model, tmp_path, address):
    rows = [{"prompt": f"{i} + {i}", "label": f"{i} + {i}", "metadata": {"pays": i / 4}} for i in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def of(workers, *flags):
        words = f"--hf-checkpoint {tiny_model} --prompt-data {tmp_path / 'sums.jsonl'} --input-key prompt"
        words += " --label-key label --num-rollout 1 --rollout-batch-size 3 --n-samples-per-prompt 2"
        words += " --rollout-max-response-len 60 --rollout-max-context-len 120 --apply-chat-template"
        words += f" --global-batch-size 6 --actor-num-gpus-per-node 1 --device cpu --output-dir {tmp_path / 'run'}"
        words += f" --rollout-engine sglang --rollout-external --rollout-external-engine-addrs {address}"
        words += f" --update-weight-transfer-mode disk --num-rollout-workers {workers}"
        return validate(parse([*words.split(), *flags])).settings

    return of


@asynccontextmanager
async def running(settings):
    """Give a pipeline that has weights, and end it."""

    def starter(tokenizer):
        return lambda number, sender_config: OwnProcess(WorkerPlan(settings, number, sender_config, pickled(tokenizer)))

    pipeline = await build_pipeline(settings, LocalHost("cpu"), starter)
    try:
        await pipeline.update_weights([WeightChunk({"w": torch.zeros(3)})], 0, None)
        yield pipeline
    finally:
        await pipeline.producer.close()


async def groups_of(settings):
    """Return the groups of the first iteration."""
    async with running(settings) as pipeline, pipeline.collecting(Start(0, None, 0)) as collected:
        return collected.scored.groups


async def test_trajectories_of_environments_are_those_of_one_process(settings_of):
    flags = ["--environment", f"{__name__}:Twice", "--rm-type", "environment"]
    alone, groups = [await groups_of(settings_of(workers, *flags)) for workers in (1, 2)]
    assert groups == alone
    samples = [sample for group in groups for sample in group.samples]
    assert len(samples) == 6 and all(0 in sample.loss_mask for sample in samples)
    assert [sample.reward for sample in samples] == [sample.metadata["pays"] for sample in samples]


async def test_trajectories_of_programs_are_those_of_one_process(settings_of, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    flags = ["--agent-command", shlex.join([sys.executable, "-I", "-S", str(tmp_path / "agent.py")])]
    flags += ["--rm-type", "exact_match"]
    alone, groups = [await groups_of(settings_of(workers, *flags)) for workers in (1, 2)]
    assert groups == alone
    assert {sample.reward for group in groups for sample in group.samples} == {1.0}


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_cancellation_that_nobody_asked_for_is_a_failure(settings_of, workers):
    path = f"{__name__}:cancels"
    settings = settings_of(workers, "--custom-generate-function-path", path, "--rm-type", "length")
    with pytest.raises(UserCodeError, match=f"^--custom-generate-function-path {path}: raised CancelledError"):
        await asyncio.wait_for(groups_of(settings), 60)


@pytest.mark.parametrize("workers", [1, 2])
async def test_metadata_that_a_function_empties_are_empty(settings_of, workers):
    settings = settings_of(workers, "--custom-generate-function-path", f"{__name__}:forgets", "--rm-type", "length")
    assert [group.prompt.metadata for group in await groups_of(settings)] == [{}, {}, {}]


async def test_metadata_that_cannot_be_sent_are_an_error_that_names_the_flag(settings_of):
    path = f"{__name__}:keeps_a_lock"
    settings = settings_of(2, "--custom-generate-function-path", path, "--rm-type", "length")
    with pytest.raises(ValueError, match=r"^--num-rollout-workers: group \d \(.*sums.jsonl:\d\) holds something"):
        await asyncio.wait_for(groups_of(settings), 60)


@asynccontextmanager
async def teacher():
    """Serve a teacher whose log-probs tell the tokens."""

    async def generate(request):
        body = await request.json()
        entries = [[-token / 1000, token, None] for token in body["input_ids"][body["logprob_start_len"] :]]
        return web.json_response(
            {"output_ids": [], "meta_info": {"input_token_logprobs": [[None, *entries[0][1:]], *entries[1:]]}}
        )

    app = web.Application()
    app.add_routes([web.post("/generate", generate)])
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def test_a_served_teacher_scores_in_workers_as_in_one_process(settings_of):
    async with teacher() as url:
        flags = ["--rm-type", "length", "--use-opd", "--opd-type", "server", "--opd-teacher-urls", url]
        alone, groups = [await groups_of(settings_of(workers, *flags)) for workers in (1, 2)]
    assert groups == alone
    for sample in (sample for group in groups for sample in group.samples):
        assert sample.teacher_log_probs == [-token / 1000 for token in sample.response_ids]


async def test_workers_record_what_they_do(settings_of):
    """Both workers are in one process here, so what either does may be in the record of one of them."""
    async with running(settings_of(2, "--rm-type", "length")) as pipeline:
        await pipeline.producer.start_profile()
        async with pipeline.collecting(Start(0, None, 0)) as collected:
            assert len(collected.scored.groups) == 3
        traces = await pipeline.producer.stop_profile()
        assert await pipeline.producer.stop_profile() == []
    assert [trace.name for trace in traces] == ["generation worker 0", "generation worker 1"]
    spans = Counter(event.name for trace in traces for event in trace.events)
    assert (spans["check an answer"], spans["make samples"], spans["pack a group"]) == (6, 3, 3)
    assert Counter(wait for trace in traces for wait, _, _ in trace.waits) == {
        "generate a group": 3,
        "score a group": 3,
    }
