"""Trainer ranks and the engines that share their GPUs, on several nodes with simulated devices."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group

from miles.config.cluster import ClusterArguments
from miles.engine.servers.engine import SpanningServer
from miles.run import session
from miles.run.engine_actors import RayHost
from miles.run.placement import GpuSlot, check_engines, choose_nodes, in_order, is_as_asked, ranks_by_node
from miles.run.session import EngineLayout, ray_session


def test_ranks_are_ordered_by_node_and_device():
    slots = [GpuSlot(0, "b", "10"), GpuSlot(1, "a", "0"), GpuSlot(2, "b", "9"), GpuSlot(3, "a", "1")]
    assert [slot.bundle for slot in in_order(slots)] == [2, 0, 1, 3]


def test_an_engine_on_two_nodes_is_refused():
    slots = [GpuSlot(0, "a", "0"), GpuSlot(1, "b", "0"), GpuSlot(2, "b", "1"), GpuSlot(3, "b", "2")]
    check_engines(slots[2:], 2, 2)
    with pytest.raises(ValueError, match="-per-engine 2: .* engine 0 are on 2 nodes, which hold 1 and 3 of"):
        check_engines(slots, 2, 2)


def test_an_engine_of_several_nodes_has_whole_ones():
    slots = [GpuSlot(0, "a", "0"), GpuSlot(1, "a", "1"), GpuSlot(2, "b", "0"), GpuSlot(3, "b", "1")]
    check_engines(slots, 4, 2)
    with pytest.raises(ValueError, match="-per-engine 4: with --colocate 2 devices of engine 0 are on 2 nodes"):
        check_engines([slots[0], slots[2], slots[1], slots[3]], 4, 2)


def test_nodes_are_those_that_were_asked_for():
    assert is_as_asked("aabb", 2, 2) and is_as_asked("bbbb", 1, 4) and is_as_asked("abab", 2, 2)
    assert not is_as_asked("aaab", 2, 2) and not is_as_asked("aaaa", 2, 2) and not is_as_asked("aabb", 1, 4)


def test_ranks_take_the_smallest_nodes_that_hold_them():
    free = {"whole": 8.0, "half": 4.0, "busy": 3.0, "other": 4.0}
    assert choose_nodes(free, 2, 4) == ["half", "other"]
    assert choose_nodes(free, 1, 5) == ["whole"]
    assert choose_nodes(free, 2, 5) is None
    assert choose_nodes(free, 2, 4, [4, 4]) == ["half", "other"], "the engines are on the whole one"
    assert choose_nodes(free, 2, 4, [4, 4, 4]) is None
    assert choose_nodes({"a": 4, "b": 4}, 2, 2, [4]) is None, "an engine is on one node"


def test_where_the_ranks_are_is_said_in_words():
    assert ranks_by_node("aab", {"a": "1.1.1.1"}) == "ranks 0-1 on 1.1.1.1, 2 on b"
    assert ranks_by_node("abab", {}) == "ranks 0 2 on a, 1 3 on b"


class Reporting:
    """A server that reports its node, and which GPUs it sees."""

    def __init__(self, host: str) -> None:
        self.host = host

    def meeting_address(self) -> str:
        return f"{self.host}:29"

    def start(self, meeting: str | None = None) -> str:
        return f"{ray.get_runtime_context().get_node_id()} {os.environ['CUDA_VISIBLE_DEVICES']}"

    def stop(self) -> None:
        pass


@ray.remote
class Rank:
    def look(self) -> tuple[str, str]:
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]


class Member(Reporting):
    """A process of a server on several nodes, which also reports the address at which it meets the others."""

    def start(self, meeting: str | None = None) -> str:
        return f"{super().start()} {meeting}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Start Ray with two nodes of four simulated GPUs, and return its address."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 4, "num_gpus": 4, "object_store_memory": 100 * 1024**2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]))
        nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            nodes.add_node(**node)
            yield nodes.address
        finally:
            nodes.shutdown()


@pytest.fixture
def two_nodes(cluster: str) -> str:
    """Return the address of the cluster once it has all GPUs back from the test before."""
    ray.init(cluster)
    while ray.available_resources().get("GPU") != 8:
        time.sleep(0.1)
    ray.shutdown()
    return cluster


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("colocate", [True, False])
async def test_an_engine_spans_nodes(two_nodes: str, colocate: bool) -> None:
    """An engine of all eight GPUs, shared with a trainer or not, is a process on each of two nodes."""
    section = ClusterArguments(
        ray_address=two_nodes,
        device="cuda",
        actor_num_nodes=2,
        actor_num_gpus_per_node=4,
        colocate=colocate,
    )
    with ray_session(section, EngineLayout(count=1, size=8, with_trainer=colocate, nodes=2)) as placement:
        host = RayHost(placement)
        parts = [host.place_server(0, Member, start_seconds=60, node=node) for node in range(2)]
        meeting = await parts[0].meeting_address()
        answers = [(await part.start(meeting)).split() for part in parts]
        assert answers[0][0] != answers[1][0] and [words[2] for words in answers] == [meeting] * 2
        assert [len(words[1].split(",")) for words in answers] == [4] * 2
        if colocate:
            for words, slots in zip(answers, (placement.slots[:4], placement.slots[4:]), strict=True):
                assert words[:2] == [slots[0].node, ",".join(slot.gpu for slot in slots)]
        assert await SpanningServer(parts).start() == " ".join(answers[0])


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_engines_see_the_gpus_of_the_ranks_that_they_share_with(two_nodes: str) -> None:
    """Two nodes of four simulated GPUs, engines of two: each sees the GPUs of two consecutive ranks, on one node."""
    section = ClusterArguments(
        ray_address=two_nodes, device="cuda", actor_num_nodes=2, actor_num_gpus_per_node=4, colocate=True
    )
    with ray_session(section, EngineLayout(count=4, size=2)) as placement:
        ranks = [Rank.options(**placement.trainer_options(rank)).remote() for rank in range(8)]
        pairs = ray.get([rank.look.remote() for rank in ranks])
        assert pairs == [(slot.node, slot.gpu) for slot in placement.slots]
        assert len({node for node, _ in pairs[:4]}) == 1 and pairs[0][0] != pairs[4][0]
        host = RayHost(placement)
        for number in range(4):
            server = host.place_server(number, Reporting, start_seconds=60)
            shared = pairs[2 * number : 2 * number + 2]
            assert await server.start() == f"{shared[0][0]} {','.join(gpu for _, gpu in shared)}"
            await server.stop()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("nodes", "per_node", "counts"), [(2, 2, [2, 2]), (1, 6, [4, 2])])
def test_ranks_are_on_as_many_nodes_as_the_flags_say(
    two_nodes: str,
    capsys: pytest.CaptureFixture[str],
    nodes: int,
    per_node: int,
    counts: list[int],
) -> None:
    """Two nodes of four simulated GPUs; Ray alone would pack two times two ranks onto one node."""
    section = ClusterArguments(
        ray_address=two_nodes, device="cuda", actor_num_nodes=nodes, actor_num_gpus_per_node=per_node
    )
    with ray_session(section, EngineLayout(count=0, size=2)) as placement:
        ranks = [Rank.options(**placement.trainer_options(rank)).remote() for rank in range(nodes * per_node)]
        where = [node for node, _ in ray.get([rank.look.remote() for rank in ranks])]
    assert [where.count(node) for node in dict.fromkeys(where)] == counts and where == sorted(where, key=where.index)
    printed = capsys.readouterr().out
    assert f"placement: ranks 0-{counts[0] - 1} on " in printed
    said = "note: the cluster has no room for --actor-num-nodes 1 with 6 devices each and the engines"
    assert (said in printed) == (per_node == 6)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ray_chooses_the_nodes_if_others_take_the_devices_of_those_that_were_chosen(
    two_nodes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray packs four ranks onto one of two nodes, and another run takes three devices of the second one meanwhile."""
    chosen: list[list[str] | None] = []

    def choose_too_late(*arguments: Any) -> list[str] | None:
        chosen.append(choose_nodes(*arguments))
        others = placement_group([{"GPU": 3.0}])  # has room on the second node only
        assert others.wait(60)
        return chosen[-1]

    monkeypatch.setattr(session, "choose_nodes", choose_too_late)
    monkeypatch.setattr(session, "CHOSEN_SECONDS", 2)
    section = ClusterArguments(
        ray_address=two_nodes, device="cuda", actor_num_nodes=2, actor_num_gpus_per_node=2, colocate=True
    )
    with ray_session(section, EngineLayout()) as placement:
        ranks = [Rank.options(**placement.trainer_options(rank)).remote() for rank in range(4)]
        where = ray.get([rank.look.remote() for rank in ranks])
    [asked] = chosen
    assert asked is not None and len(set(asked)) == 2
    assert len({node for node, _ in where}) == 1 and len({gpu for _, gpu in where}) == 4
    printed = capsys.readouterr().out
    assert "placement: ranks 0-3 on " in printed
    assert (
        "note: the cluster has no room for --actor-num-nodes 2 with 2 devices each and the engines, or Ray" in printed
    )
