"""Trainer ranks and the engines that share their GPUs, on several nodes with simulated devices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray

from miles.arguments.cluster import ClusterArguments
from miles.cluster.device_slots import Slot, check_engines, in_order
from miles.cluster.rollout_processes.engine_servers import RayHost
from miles.cluster.session import EngineLayout, ray_session


def test_ranks_are_ordered_by_node_and_device():
    slots = [Slot(0, "b", "10"), Slot(1, "a", "0"), Slot(2, "b", "9"), Slot(3, "a", "1")]
    assert [slot.bundle for slot in in_order(slots)] == [2, 0, 1, 3]


def test_an_engine_on_two_nodes_is_refused():
    slots = [Slot(0, "a", "0"), Slot(1, "b", "0"), Slot(2, "b", "1"), Slot(3, "b", "2")]
    check_engines(slots[2:], 2)
    with pytest.raises(ValueError, match="-per-engine 2: .* engine 0 are on 2 nodes, which hold 1 and 3 of"):
        check_engines(slots, 2)


class Reporting:
    """A server that reports its node, and which GPUs it sees."""

    def __init__(self, host: str) -> None:
        self.host = host

    def start(self) -> str:
        return f"{ray.get_runtime_context().get_node_id()} {os.environ['CUDA_VISIBLE_DEVICES']}"

    def stop(self) -> None:
        pass


@ray.remote
class Rank:
    def look(self) -> tuple[str, str]:
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_engines_see_the_gpus_of_the_ranks_that_they_share_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of four simulated GPUs, engines of two: each sees those of two consecutive ranks, on one node."""
    from ray.cluster_utils import Cluster

    path = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    node = {"num_cpus": 4, "num_gpus": 4, "object_store_memory": 100 * 1024**2}
    nodes = Cluster(initialize_head=True, head_node_args=node)
    nodes.add_node(**node)
    given = ClusterArguments(
        ray_address=nodes.address, device="cuda", actor_num_nodes=2, actor_num_gpus_per_node=4, colocate=True
    )
    try:
        with ray_session(given, EngineLayout(count=4, size=2)) as placement:
            ranks = [Rank.options(**placement.trainer_options(rank)).remote() for rank in range(8)]
            found = ray.get([rank.look.remote() for rank in ranks])
            assert found == [(slot.node, slot.gpu) for slot in placement.slots]
            assert len({node for node, _ in found[:4]}) == 1 and found[0][0] != found[4][0]
            host = RayHost(placement)
            for number in range(4):
                server = host.place_server(number, Reporting, start_seconds=60)
                shared = found[2 * number : 2 * number + 2]
                assert await server.start() == f"{shared[0][0]} {','.join(gpu for _, gpu in shared)}"
                await server.stop()
    finally:
        nodes.shutdown()
