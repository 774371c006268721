"""The rollout side's answers to the main loop, without Ray."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from miles.config.components import ENGINES
from miles.config.servers.flags import SglangArguments
from miles.engine.weight_sync.deltas import DeltaWriter
from miles.observe.sample_records import StoredSamples
from miles.rollout.collect import ScoredGroups
from miles.rollout.ordering import Start
from miles.rollout.pipeline import CollectedIteration
from miles.run.liveness import ActorLost
from miles.run.object_store import UpdateWeights, store_packed
from miles.run.rollout_actor import RolloutActor, RolloutDriver
from miles.run.train_actor import TrainActor
from miles.tasks.data.stream import NoPromptsLeft
from miles.types.dims import ParallelDims
from miles.types.metrics import Metric
from miles.types.weights import WeightChunk, pack


async def test_without_prompts_there_is_no_iteration_and_that_is_no_failure():
    @asynccontextmanager
    async def collecting(start):
        raise NoPromptsLeft
        yield

    actor = object.__new__(RolloutActor)
    actor._settings = SimpleNamespace(dims=ParallelDims(2))
    actor._built = SimpleNamespace(collecting=collecting)
    answer = await actor.generate(Start(3, 2, 3))
    assert answer == (None, [], [])

    driver = object.__new__(RolloutDriver)
    driver._planner = SimpleNamespace(start_until=lambda iteration: [])
    driver._started = {3: answer}
    driver._replaces = driver._dead = False
    driver._result = lambda call: call
    assert driver.generate(3) is None


def test_a_worker_that_is_lost_while_it_stops_recording_is_replaced():
    """Its trace is missing then; the run continues."""

    def stop_lost():
        raise ActorLost(lost, "the rollout worker died")

    def replace_worker():
        driver.worker, driver._dead = other, False

    lost, other = (SimpleNamespace(stop_profile=SimpleNamespace(remote=lambda f=f: f)) for f in (stop_lost, list))
    driver = object.__new__(RolloutDriver)
    driver.worker, driver._replaces, driver._dead = lost, True, False
    driver._result, driver._replace = lambda call: call(), replace_worker
    assert driver.stop_profile() == [] and driver.worker is other


async def test_ranks_that_share_their_sequences_get_one_object():
    settings = SimpleNamespace(dims=ParallelDims(4, context_parallel_size=2))
    samples, position = StoredSamples([]), {"position": 7}

    @asynccontextmanager
    async def collecting(start):
        yield CollectedIteration(ScoredGroups([], {}), position, {"perf/engine_busy": Metric(0.5)})

    actor = object.__new__(RolloutActor)
    actor._settings = settings
    actor._built = SimpleNamespace(collecting=collecting)
    actor._convert = lambda iteration, groups: (["first", "first", "second", "second"], samples)
    answer = await actor.generate(Start(3, 2, 3))
    summary, *shards = answer
    assert shards == ["first", "second"], "as many objects as there are replicas"
    assert (summary.samples, summary.prompts_after) == (samples, position)
    assert {*summary.metrics} == {"perf/engine_busy", "perf/rollout_memory_gib"}

    driver = object.__new__(RolloutDriver)
    driver.settings = settings
    driver._planner = SimpleNamespace(start_until=lambda iteration: [])
    driver._started = {3: [summary, "images", *shards]}
    driver._replaces = driver._dead = False
    driver._result = lambda call: call
    generated = driver.generate(3)
    assert generated.shards_by_rank == [("images", replica) for replica in ("first", "first", "second", "second")]
    assert driver._position == {"position": 7}


class Stored:
    """A reference to an object, or the answer of an actor, as Ray's."""

    def __init__(self, value):
        self.future = lambda: SimpleNamespace(result=lambda: value)


class Loads:
    """A pipeline whose engine copies the weights that it is given, in a thread."""

    async def update_weights(self, chunks, version, after):
        self.weights = {}

        def load():
            for chunk in chunks:
                self.weights |= {name: tensor.clone() for name, tensor in chunk.tensors.items()}

        await asyncio.to_thread(load)
        return 0.5


async def test_the_embedded_engine_gets_deltas_and_all_weights_if_one_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("miles.run.object_store.ray.put", Stored)
    weights = {"a": torch.zeros(1000, dtype=torch.bfloat16), "b": torch.ones(8)}
    trainer = object.__new__(TrainActor)
    trainer.rank, trainer.deltas = 0, DeltaWriter(tmp_path / "weights")
    trainer.backend = SimpleNamespace(export_weights=lambda: [WeightChunk({n: w}) for n, w in weights.items()])
    ask = SimpleNamespace(remote=lambda identity: Stored(trainer.whole_weights(identity)))

    actor = object.__new__(RolloutActor)
    copies = SglangArguments(update_weight_transfer_mode="disk-delta", update_weight_copy_dir=str(tmp_path / "copies"))
    actor._settings = SimpleNamespace(
        sends_deltas=True, sglang=copies, engine=ENGINES["torch"], weights_folder=tmp_path / "weights"
    )
    actor._built = Loads()
    driver = object.__new__(RolloutDriver)
    driver._whole_updates = 0

    async def sync(version, loses=False):
        exported = trainer.export_weights()
        if loses:
            (Path(exported.offer.folder) / "delta.json").unlink()
        exported = replace(exported, trainer=SimpleNamespace(whole_weights=ask))
        driver._note_update(await actor.update_weights(exported, version, None))
        tensors = actor._built.weights
        assert tensors.keys() == weights.keys() and all(torch.equal(tensors[name], weights[name]) for name in weights)
        return {name.removeprefix("weight_sync/"): metric.value for name, metric in driver.weight_metrics.items()}

    first = await sync(0)
    assert first == {"bytes": 2032, "whole": 1, "load_seconds": 0.5, "whole_updates": 1}
    weights["a"][5] = 3.0
    second = await sync(1)
    assert second["bytes"] < 2032 and second["changed_fraction"] == 1 / 1008 and second["encode_seconds"] > 0
    assert (second["whole"], second["whole_updates"]) == (0, 1)
    weights["a"][6] = 3.0
    third = await sync(2, loses=True)
    assert third["bytes"] > 2032 and (third["whole"], third["whole_updates"]) == (1, 2)
    assert (await sync(2))["whole_updates"] == 2, "the same weights again"


@pytest.mark.parametrize("mode", ["disk", "broadcast", "ipc"])
async def test_the_bytes_and_seconds_of_an_update_are_measured_in_every_mode(monkeypatch, mode):
    monkeypatch.setattr("miles.run.object_store.ray.put", Stored)
    weights = [{"a": torch.zeros(1000, dtype=torch.bfloat16)}, {"b": torch.ones(8)}]
    actor, driver = object.__new__(RolloutActor), object.__new__(RolloutDriver)
    sglang = SglangArguments(update_weight_transfer_mode=mode)
    actor._settings = SimpleNamespace(sends_deltas=False, sglang=sglang, engine=ENGINES["torch"])
    actor._built = Loads()
    sent = UpdateWeights(store_packed(pack(WeightChunk(tensors)) for tensors in weights))
    driver._note_update(await actor.update_weights(sent, 1, None))
    metrics = {name: metric.value for name, metric in driver.weight_metrics.items()}
    assert metrics == {"weight_sync/bytes": 2032, "weight_sync/load_seconds": 0.5}
