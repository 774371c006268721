"""Runs over several nodes: Ray's own cluster, whose nodes are on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster
from tolerance import SERVER_LOG_PROB_ERROR

from tests.fast.run.runs.launches import importing_from

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REPORT_SECONDS = 30.0  # for the death of a node; a few on a machine that does nothing else
SERVERS = ["--rollout-engine", "sglang", "--sglang-max-total-tokens", "4096", "--sglang-max-running-requests", "32"]


class Nodes:
    """A head without devices, and nodes of one CPU, so that each holds one process that computes."""

    def __init__(self) -> None:
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self._nodes: list[Any] = []
        self.address = self._cluster.address

    def add(self) -> None:
        self._nodes.append(self._cluster.add_node(num_cpus=1, object_store_memory=100 * 1024**2))

    def kinds(self) -> list[set[str]]:
        """Return the classes of the actors on each node."""
        return [{kind for kind in ("TrainActor", "EngineActor") if self._runs(node, kind)} for node in self._nodes]

    def kill(self, kind: str) -> None:
        """Kill the last node that has an actor of class ``kind``, with everything on it."""
        node = [node for node in self._nodes if self._runs(node, kind)][-1]
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def end(self) -> None:
        self._cluster.shutdown()

    def _runs(self, node: Any, kind: str) -> bool:
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        return any(" ".join(child.cmdline()).startswith(f"ray::{kind}") for child in raylet.children())


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, workplace: Path) -> Iterator[Nodes]:
    """Start Ray with two nodes whose workers find the reward functions."""
    repo = str(Path(__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([repo, importing_from(workplace)]))
    started = Nodes()
    try:
        started.add()
        started.add()
        yield started
    finally:
        started.end()


def test_ranks_on_two_nodes_learn_and_the_death_of_a_node_is_reported(launch: Callable[..., Any], nodes: Nodes) -> None:
    where = ["--ray-address", nodes.address, "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1", "--colocate"]
    run = launch("two_nodes", *where, "--num-rollout", "1000")
    run.wait_until(run.has_rows)
    assert nodes.kinds() == [{"TrainActor"}] * 2
    began = time.monotonic()
    nodes.kill("TrainActor")
    assert run.wait() == 1
    seconds = time.monotonic() - began
    assert "trainer rank" in run.err and "died" in run.err, run.err
    assert seconds < REPORT_SECONDS
    assert all(row["train/grad_norm"] > 0 for row in run.rows().values())


def test_an_engine_is_on_another_node_and_follows_when_a_node_returns(launch: Callable[..., Any], nodes: Nodes) -> None:
    checks = ["--use-fault-tolerance", "--rollout-health-check-interval", "2"]
    run = launch("engine_node", "--ray-address", nodes.address, *SERVERS, *checks, "--num-rollout", "8")
    run.wait_until(run.has_rows)
    assert sorted(map(sorted, nodes.kinds())) == [["EngineActor"], ["TrainActor"]]
    before = len(run.rows())
    nodes.kill("EngineActor")
    nodes.add()
    assert run.wait() == 0, run.err
    rows = run.rows()
    assert before < 16 and sorted(rows) == list(range(1, 17)), "the node was lost before the run had ended"
    # In the first step of each iteration, before the trainer's weights change: fp32.
    assert max(rows[step]["train/train_rollout_logprob_abs_diff"] for step in range(1, 17, 2)) < SERVER_LOG_PROB_ERROR


def test_an_engine_spans_two_nodes(launch: Callable[..., Any], nodes: Nodes) -> None:
    nodes.add()
    engine = ["--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--num-gpus-per-node", "1"]
    run = launch("spanning_engine", "--ray-address", nodes.address, *SERVERS, *engine, "--num-rollout", "8")
    run.wait_until(run.has_rows)
    assert sorted(map(sorted, nodes.kinds())) == [["EngineActor"], ["EngineActor"], ["TrainActor"]]
    assert run.wait() == 0, run.err
    rows = run.rows()
    assert max(rows[step]["train/train_rollout_logprob_abs_diff"] for step in range(1, 17, 2)) < SERVER_LOG_PROB_ERROR
