"""A node of a joined cluster whose raylet is killed or stopped, and workers on it: Ray's own cluster of two nodes."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from miles.config.cluster import ClusterArguments
from miles.run import liveness, ray_watch, session
from miles.run.liveness import ActorLost, Workers, with_heartbeat
from miles.run.ray_watch import RayWatch, parts_of_ray
from miles.run.session import LOCAL_RAY, RAY_DEFAULTS, EngineLayout, Placement, without_extras
from tests.fast.run.actors.sleepers import FOR_EVER, Sleeper

# A dead node is noticed sooner than after 12 s; one that is stopped after more than a minute, as by default.
NOTICES = {"RAY_health_check_period_ms": "300"}
SIZE = {"num_cpus": 1, "object_store_memory": 10**8}
_numbers = itertools.count(2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Start a head of one CPU, and connect to it."""
    with pytest.MonkeyPatch.context() as patch:
        path = [str(Path(__file__).parents[4]), os.environ.get("PYTHONPATH", "")]
        for name, value in (RAY_DEFAULTS | LOCAL_RAY | NOTICES | {"PYTHONPATH": os.pathsep.join(path)}).items():
            patch.setenv(name, value)
        with without_extras():
            started = Cluster(initialize_head=True, head_node_args={**SIZE, "include_log_monitor": False})
        try:
            ray.init(started.address, log_to_driver=False)
            yield started
        finally:
            ray.shutdown()
            started.shutdown()


@pytest.fixture
def watch(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Watch Ray as a run does that has joined the cluster, with less patience."""
    monkeypatch.setattr(liveness, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(ray_watch, "CONNECT_SECONDS", 0.5)
    watch = RayWatch(parts_of_ray(), lambda loss: None)
    yield
    watch.end()


def added(cluster: Cluster) -> tuple[str, psutil.Process]:
    """Add a node of one CPU; return its address and its raylet."""
    address = f"127.0.0.{next(_numbers)}"
    node: Any = cluster.add_node(**SIZE, node_ip_address=address, include_log_monitor=False)
    return address, psutil.Process(node.all_processes["raylet"][0].process.pid)


@pytest.mark.usefixtures("watch")
@pytest.mark.parametrize(
    ("number", "patience"), [pytest.param(signal.SIGKILL, 60.0, marks=pytest.mark.slow), (signal.SIGSTOP, 2.0)]
)
def test_a_worker_is_lost_with_its_node_and_the_run_takes_another(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, patience: float
) -> None:
    monkeypatch.setattr(ray_watch, "LOST_SECONDS", patience)
    address, raylet = added(cluster)
    section = ClusterArguments(ray_address=cluster.address, device="cpu", actor_num_gpus_per_node=1)
    placement = Placement(None, section, "cpu", EngineLayout())
    placement.place()
    workers, first = Workers(seconds=60.0), with_heartbeat(Sleeper)
    actors = [
        first.options(**options).remote() for options in (placement.trainer_options(0), placement.rollout_options())
    ]
    for name, actor in zip(("one", "two"), actors, strict=True):
        workers.add(name, actor)
    workers.results([actor.sleep.remote(0) for actor in actors])
    pids = [psutil.Process(pid) for pid in ray.get([actor.heartbeat.remote(0) for actor in actors])]
    (there,) = [process for process in pids if process.ppid() == raylet.pid]

    raylet.send_signal(number)
    if number == signal.SIGKILL:
        raylet.wait(30)  # its workers take a zombie for alive
    died = rf"(one|two) died \(with its node {address}: (Ray's raylet there does not answer|health check failed)"
    silent = rf"(one|two) \(process {there.pid}\) is lost with its node: Ray's raylet at {address}:\d+ has not answered"
    with pytest.raises(ActorLost, match=died if number == signal.SIGKILL else silent):
        workers.results([actor.sleep.remote(FOR_EVER) for actor in actors])
    assert psutil.wait_procs([there], timeout=30)[1] == [], "its raylet cannot end it"
    for actor in actors:
        workers.end(actor)

    monkeypatch.setattr(session, "PLACEMENT_SECONDS", 1)
    with pytest.raises(ActorLost, match="a node of the cluster was lost, and the run needs 2 bundles with 2 CPUs"):
        placement.renew()
    monkeypatch.setattr(session, "PLACEMENT_SECONDS", 60)
    if number == signal.SIGSTOP:
        raylet.kill()
    _, other = added(cluster)
    placement.renew()
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    assert len(placement.nodes) == 2 and address not in {nodes[node] for node in placement.nodes}
    before = placement.group
    placement.renew()
    assert placement.group is before, "nothing was lost since"
    placement.remove()
    other.kill()
