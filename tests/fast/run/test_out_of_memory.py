"""Ray ends a worker when the memory of its host is nearly used up: a death like others, with another error of Ray's."""

import asyncio
import os

import pytest
import ray

from miles.engine.base import ServerFailed
from miles.rollout.workers.pool import WorkerLost as GenerationWorkerLost
from miles.run import engine_actors
from miles.run.engine_actors import GenerationActor, RayWorker
from miles.run.failures import in_one_line, is_death
from miles.run.liveness import ActorLost, Workers, with_heartbeat
from tests.fast.run.actors.small_ray import small_ray

WHY = r"died \(Ray has ended it, as the memory of its host was nearly used up \(RAY_memory_usage_threshold\)\)"
OPTIONS = {"num_cpus": 0, "max_restarts": 0}


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    """Start a Ray that ends every worker."""
    with small_ray(RAY_memory_usage_threshold="0.001", RAY_memory_monitor_refresh_ms="100"):
        yield


def test_the_worker_is_lost_and_the_reason_is_named():
    workers = Workers(seconds=60.0)
    actor = with_heartbeat(GenerationActor).options(**OPTIONS).remote(EndlessPlan())
    workers.add("the rollout worker", actor, replaceable=True)
    with pytest.raises(ActorLost, match=f"^the rollout worker {WHY}$") as lost:
        workers.results([actor.prepare.remote()], whose=actor)
    assert lost.value.worker is actor
    error = lost.value.__cause__
    assert isinstance(error, ray.exceptions.OutOfMemoryError) and is_death(error)
    assert in_one_line(error).startswith("a worker process died (Ray has ended it")


async def test_a_generation_worker_is_lost_too():
    worker = RayWorker(with_heartbeat(GenerationActor).options(**OPTIONS).remote(EndlessPlan()), seconds=60.0)
    try:
        with pytest.raises(GenerationWorkerLost, match=f"{WHY}$"):
            await asyncio.wait_for(worker.prepare(), 60)
    finally:
        worker.kill()


async def test_a_server_has_failed():
    server = engine_actors.ActorServer("engine 0", lambda host: SlowServer(), OPTIONS, "127.0.0.1", 60.0)
    with pytest.raises(ServerFailed, match="engine 0 was killed while it started"):
        await server.start()


class EndlessPlan:
    """The plan of a worker that is not built before its actor is ended."""

    @property
    def settings(self):
        os.read(os.pipe()[0], 1)


class SlowServer:
    """A server that does not start before its actor is ended."""

    def start(self, meeting):
        os.read(os.pipe()[0], 1)
