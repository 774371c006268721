"""Generation workers (``--num-rollout-workers``): real Ray actors, the whole rollout side, and a simulated server."""

import asyncio
import json
import os
import signal
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from transformers import AutoConfig

from miles.base.text import InputError
from miles.config.cluster import ClusterArguments
from miles.config.evaluation import EvaluationArguments
from miles.config.model import ModelArguments
from miles.config.rollout import RolloutArguments
from miles.config.servers.flags import SglangArguments
from miles.config.settings import Settings
from miles.config.tracking import TrackingArguments
from miles.config.training import TrainingArguments
from miles.config.validate import validate
from miles.engine.base import LocalHost
from miles.rollout.groups import response_seed
from miles.rollout.ordering import Start
from miles.rollout.pipeline import build_pipeline
from miles.run.engine_actors import worker_starter
from miles.tasks.data.settings import DataArguments
from miles.tasks.rewards.settings import RewardArguments
from miles.types.weights import WeightChunk
from tests.fast.engine.answering_server import AnsweringServer
from tests.fast.run.actors.kept_workers import KeptWorkers
from tests.fast.run.actors.small_ray import small_ray

ROOT = Path(__file__).parents[3]
WEIGHTS = [WeightChunk({"w": torch.zeros(3)})]
PLACEMENT = SimpleNamespace(generation_worker_options=lambda: {"num_cpus": 0, "max_restarts": 0})
FUNCTIONS = '''
import os
from miles.rollout.filters import FilterDecision

def odd(group):
    """Keep the groups of odd index, and note in the metadata which process has decided."""
    group.prompt.metadata["filtered_by"] = os.getpid()
    return FilterDecision(group.group_index % 2 == 1, "even")

async def two_turns(trajectory):
    await trajectory.generate(max_new_tokens=2)
    trajectory.append("so ")
    await trajectory.generate()
    trajectory.sample.made_in = os.getpid()

async def asks_too_much(trajectory):
    try:
        await trajectory.engine.update_weights([], 7)
    except AttributeError as error:
        raise KeyError("gold") from error
'''


@pytest.fixture(scope="module", autouse=True)
def local_ray(tmp_path_factory):
    functions = tmp_path_factory.mktemp("functions")
    (functions / "own_functions.py").write_text(FUNCTIONS)
    with small_ray(PYTHONPATH=os.pathsep.join([str(functions), str(ROOT)])), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(functions)
        yield


@pytest.fixture
async def server(tiny_model):
    fake_server = AnsweringServer(AutoConfig.from_pretrained(tiny_model).vocab_size)
    fake_server.address = await fake_server.start()
    yield fake_server
    await fake_server.stop()


@pytest.fixture
def settings_of(tiny_model, tmp_path, server):
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{i} + {i} = ", "label": str(2 * i), "metadata": {"row": i}} for i in range(7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def of(workers, sglang=None, reward="length", **rollout):
        rollout = {"rollout_batch_size": 6, "n_samples_per_prompt": 4, "num_rollout": 3} | rollout
        flags = Settings(
            model=ModelArguments(hf_checkpoint=str(tiny_model)),
            data=DataArguments(prompt_data=str(path), input_key="prompt", rollout_shuffle=True),
            reward=RewardArguments(rm_type=reward),
            rollout=RolloutArguments(
                rollout_engine="sglang", num_rollout_workers=workers, rollout_max_response_len=9, **rollout
            ),
            sglang=SglangArguments(
                rollout_external=True,
                rollout_external_engine_addrs=(server.address,),
                update_weight_transfer_mode="disk",
                **{"sglang_server_concurrency": 12, **(sglang or {})},
            ),
            evaluation=EvaluationArguments(eval_prompt_data=("held", str(path)), eval_interval=1),
            training=TrainingArguments(global_batch_size=24),
            cluster=ClusterArguments(actor_num_gpus_per_node=1),
            tracking=TrackingArguments(output_dir=str(tmp_path / "run")),
        )
        return validate(flags).settings

    return of


@pytest.fixture(scope="module")
def running(local_ray):
    """Return ``running(settings)``: give a pipeline, and end it. Its workers are processes of earlier tests or new."""
    workers = KeptWorkers()

    @asynccontextmanager
    async def of(settings, start_worker=workers.starter):
        start = partial(start_worker, settings) if settings.rollout.num_rollout_workers > 1 else None
        pipeline = await build_pipeline(settings, LocalHost("cpu"), start)
        try:
            async with asyncio.timeout(600):
                yield pipeline
        finally:
            await pipeline.producer.close()

    yield of
    workers.end()


def own_workers(settings, tokenizer):
    """Start workers in processes of their own, as a run does."""
    return worker_starter(settings, PLACEMENT, tokenizer)


async def collect(pipeline, iteration, version=None):
    """Load weights, then collect an iteration."""
    after = iteration - 1 if iteration else None
    await pipeline.update_weights(WEIGHTS, iteration if version is None else version, after)
    return await only_collect(pipeline, iteration)


async def only_collect(pipeline, iteration):
    async with pipeline.collecting(Start(iteration, iteration - 1 if iteration else None, 0)) as collected:
        return collected.scored


def content(scored):
    """Return everything about the groups, in order, apart from times."""
    metrics = {name: metric for name, metric in scored.metrics.items() if not name.startswith("time/")}
    return scored.groups, metrics


def pids_of(pipeline):
    """Return the process of each worker."""
    workers = pipeline.producer.workers._workers
    return {n: ray.get(worker.process._actor.heartbeat.remote(0.0)) for n, worker in sorted(workers.items())}


def expected_seeds(settings, indices, samples=4):
    seeds = (response_seed(settings.data.rollout_seed, index, k) for index in indices for k in range(samples))
    return Counter(seed & 0x7FFFFFFF for seed in seeds)


async def test_three_workers_collect_what_one_process_does(settings_of, running, server):
    """Groups, their order, rewards, token counts, evaluation, and the position in the prompts are the same."""
    server.latency = 0.05
    results = {}
    for workers in (1, 3):
        settings = settings_of(workers)
        async with running(settings) as pipeline:
            scored = [await collect(pipeline, iteration) for iteration in range(2)]
            metrics = await pipeline.evaluate()
            results[workers] = [content(one) for one in scored], metrics, pipeline.state(2)
            loads = pipeline.producer.queue_lengths()
    assert results[1] == results[3]
    assert [group.group_index for group in results[3][0][1][0]] == list(range(6, 12))
    assert loads == {f"groups in generation worker {n}": 0 for n in range(3)}
    assert server.most_in_flight == 12, "--sglang-server-concurrency is for all workers together"


async def test_each_worker_records_its_part_of_a_profile(settings_of, running):
    async with running(settings_of(2)) as pipeline:
        await pipeline.producer.start_profile()
        await collect(pipeline, 0)
        traces = await pipeline.producer.stop_profile()
        assert await pipeline.producer.stop_profile() == []
    assert [trace.name for trace in traces] == ["generation worker 0", "generation worker 1"]
    for name, times in {"decode an answer": 24, "check an answer": 24, "pack a group": 6}.items():
        assert sum(event.name == name for trace in traces for event in trace.events) == times
    waits = Counter(name for trace in traces for name, _, _ in trace.waits)
    assert waits == {"generate a group": 6, "score a group": 6}


@pytest.mark.slow
async def test_connections_are_bounded_and_used_again(settings_of, running, server):
    server.latency = 0.1
    async with running(settings_of(3, {"sglang_server_concurrency": 6})) as pipeline:
        for iteration in range(2):
            await collect(pipeline, iteration)
    assert server.asked.total() == 48 and len(server.peers) <= 6 + 8, "a few more for health checks and updates"
    assert server.most_in_flight == 6


@pytest.mark.parametrize(
    "end", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=["killed", "stopped"]
)
async def test_the_groups_of_a_lost_worker_are_generated_again_with_their_seeds(settings_of, running, server, end):
    """All prompts are there once, in order. Another worker takes the place of the lost one."""
    settings = settings_of(2, {"use_fault_tolerance": True, "sglang_server_concurrency": 48})
    if end == signal.SIGSTOP:  # long enough for the others on a busy machine
        settings = replace(settings, cluster=replace(settings.cluster, worker_timeout=10.0))
    async with running(settings_of(1)) as pipeline:
        alone = await collect(pipeline, 0)
    server.asked.clear()
    async with running(settings, own_workers) as pipeline:
        server.hold()
        collecting = asyncio.ensure_future(collect(pipeline, 0))
        await server.until(24)
        pids = pids_of(pipeline)
        os.kill(pids[1], end)
        while Counter(server.asked.values())[2] < 12:  # three groups of four are asked for again
            await asyncio.sleep(0.05)
        server.answer()
        assert content(await collecting) == content(alone)
        again = await collect(pipeline, 1)
        while len(pids_of(pipeline)) < 2:
            await asyncio.sleep(0.05)
        assert pids_of(pipeline)[1] != pids[1]
    assert [group.group_index for group in again.groups] == list(range(6, 12))
    assert server.asked.keys() == expected_seeds(settings, range(12)).keys()
    assert server.asked.total() == 48 + 12


@pytest.mark.slow
async def test_without_fault_tolerance_the_loss_of_a_worker_is_one_sentence(settings_of, running, server):
    async with running(settings_of(2)) as pipeline:
        server.hold()
        collecting = asyncio.ensure_future(collect(pipeline, 0))
        await server.until(12)
        pid = pids_of(pipeline)[0]
        os.kill(pid, signal.SIGKILL)
        words = rf"generation worker 0 \(process {pid}\) died \(out of memory, .*; with --use-fault-tolerance it would"
        with pytest.raises(RuntimeError, match=words):
            await collecting


@pytest.mark.slow
async def test_a_group_that_ends_every_worker_ends_the_run(settings_of, running, server, monkeypatch):
    monkeypatch.setattr("miles.rollout.workers.pool.GROUP_TRIES", 2)
    settings = settings_of(2, {"use_fault_tolerance": True}, rollout_batch_size=1, n_samples_per_prompt=24)
    async with running(settings) as pipeline:
        server.hold()
        collecting = asyncio.ensure_future(collect(pipeline, 0))
        for number in (6, 12):
            await server.until(number)
            [busy] = [n for n, worker in pipeline.producer.workers._workers.items() if worker.orders]
            os.kill(pids_of(pipeline)[busy], signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"the 2th one with .*sums\.jsonl:\d in it"):
            await collecting


async def test_an_early_stop_cancels_and_aborts_in_every_worker(settings_of, running, server):
    """Six of eight groups are taken; the requests of the others end before the iteration does."""
    settings = settings_of(2, over_sampling_early_stop=True, over_sampling_batch_size=8)
    async with running(settings) as pipeline:
        server.held |= expected_seeds(settings, [3], samples=1).keys()
        first = await collect(pipeline, 0)
        unfinished = first.metrics["rollout/unfinished_groups"].value
        assert unfinished >= 1 and unfinished + first.metrics["rollout/surplus_groups"].value == 2
        assert await pipeline.producer.workers.in_flight() == 0 and not any(pipeline.producer.queue_lengths().values())
        second = await collect(pipeline, 1)
    indices = [group.group_index for scored in (first, second) for group in scored.groups]
    assert len(set(indices)) == 12 and set(indices) <= set(range(16)) - {3}
    assert {v for group in second.groups for sample in group.samples for v in sample.weight_versions} == {1}


async def test_a_partial_rollout_continues_in_its_worker_under_new_weights(settings_of, running, server):
    settings = settings_of(2, {"sglang_server_concurrency": 64}, partial_rollout=True, over_sampling_batch_size=8)
    async with running(settings) as pipeline:
        server.held |= expected_seeds(settings, [3], samples=1).keys()
        first = await collect(pipeline, 0)
        assert server.in_flight == 0, "nothing runs across the update"
        evaluation = await pipeline.evaluate()  # not held back
        second = await collect(pipeline, 1)
    assert evaluation["eval/held/aborted_fraction"].value == 0
    [begun] = [group for group in second.groups if group.group_index == 3]
    assert begun.samples[0].weight_versions[0] == 0 and set(begun.samples[0].weight_versions) == {0, 1}
    groups = [group for scored in (first, second) for group in scored.groups]
    assert len({group.group_index for group in groups}) == 12
    assert all(len(group.samples) == 4 for group in groups)


async def test_weights_change_while_workers_generate(settings_of, running, server):
    """Under --fully-async every answer has a version that was in use, and no request is sent twice."""
    settings = settings_of(2, async_steps=1, fully_async=True)
    async with running(settings) as pipeline:
        await pipeline.update_weights(WEIGHTS, 0, None)
        server.hold()
        collecting = asyncio.ensure_future(only_collect(pipeline, 0))
        await server.until(12)
        await pipeline.update_weights(WEIGHTS, 1, None)
        server.answer()
        first = await collecting
        await pipeline.update_weights(WEIGHTS, 2, None)
        second = await only_collect(pipeline, 1)
    indices = [group.group_index for scored in (first, second) for group in scored.groups]
    assert len(set(indices)) == 12
    assert max(Counter(server.asked).values()) == 1, "no answer was refused for its version"
    assert server.versions.keys() >= {"0", "1"}


async def test_a_failed_request_is_checked_by_the_rollout_process_and_sent_again(
    settings_of, running, server, monkeypatch
):
    checks = []
    async with running(settings_of(2)) as pipeline:
        check = pipeline.producer.engine.check_servers

        async def counted():
            checks.append(1)
            await check()
            server.fails = False

        monkeypatch.setattr(pipeline.producer.engine, "check_servers", counted)
        server.fails = True
        scored = await collect(pipeline, 0)
    assert checks and len(scored.groups) == 6
    assert server.asked == expected_seeds(settings_of(2), range(6))


async def test_filters_trajectories_and_metadata_of_the_user_are_those_of_one_process(settings_of, running):
    own = {
        "dynamic_sampling_filter_path": "own_functions:odd",
        "custom_generate_function_path": "own_functions:two_turns",
        "rollout_max_context_len": 64,
    }
    results = {}
    for workers in (1, 2):
        async with running(settings_of(workers, **own)) as pipeline:
            scored = await collect(pipeline, 0)
            makers = {s.made_in for group in scored.groups for s in group.samples}
            filters = {group.prompt.metadata["filtered_by"] for group in scored.generated}
            for group in scored.generated:
                group.prompt.metadata.pop("filtered_by", None)  # a prompt is in several groups
        assert (makers | filters == {os.getpid()}) == (workers == 1)
        results[workers] = content(scored)
        assert [group.group_index for group in scored.groups] == [1, 3, 5, 7, 9, 11]
    assert results[1] == results[2]
    assert results[2][1]["rollout/dropped/even"].value == 6


async def test_an_error_in_a_worker_is_raised_as_it_is(settings_of, running):
    settings = settings_of(2, custom_generate_function_path="own_functions:asks_too_much", rollout_max_context_len=64)
    async with running(settings) as pipeline:
        with pytest.raises(KeyError, match="gold") as raised:
            await collect(pipeline, 0)
    [trace] = raised.value.__notes__
    assert "in asks_too_much" in trace, "the worker's traceback"
    assert "engine.update_weights is called in a generation worker" in trace, "the engine is the rollout process's"


@pytest.mark.slow
async def test_mastered_prompts_are_left_out_by_the_rollout_process(settings_of, running, monkeypatch):
    """``--max-prompt-pass-rate`` changes the stream, which is here, by groups that are scored there."""
    left_out = []
    monkeypatch.setattr("miles.rollout.collect.passes_of", lambda group: [True])
    async with running(settings_of(2, max_prompt_pass_rate=0.9)) as pipeline:
        monkeypatch.setattr(pipeline.stream, "leave_out", left_out.append)
        scored = await collect(pipeline, 0)
    assert sorted(left_out) == sorted(group.group_index for group in scored.groups) == list(range(6))


@pytest.mark.slow
async def test_what_the_settings_name_must_be_there(settings_of):
    settings = settings_of(2)
    broken = replace(settings, model=replace(settings.model, hf_checkpoint="/nowhere"))
    with pytest.raises(InputError, match="--hf-checkpoint /nowhere: cannot load a tokenizer"):
        await build_pipeline(settings, LocalHost("cpu"), lambda _: worker_starter(broken, PLACEMENT, lambda: None))
