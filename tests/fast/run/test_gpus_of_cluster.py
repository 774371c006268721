"""A cluster is asked for its GPUs by a separate process, with real clusters of simulated GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from socket import socket

import pytest

from miles.base.host import has_gpu
from miles.config.choice import joined_cluster
from miles.run.gpus_of_cluster import knock
from tests.fast.support.ray_head import ENVIRONMENT, answers, free_ports, ray_head

REPO = Path(__file__).parents[3]
FLAGS = (
    "--hf-checkpoint some/model --prompt-data reasoning_gym:products --rm-type last_number --num-rollout 1 "
    "--rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 64 --explain"
)


def test_a_port_with_and_without_a_listener() -> None:
    with socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
        with pytest.raises(ConnectionRefusedError):
            knock(address)
        one.listen()
        knock(address)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_head_that_does_not_answer_is_left_after_two_seconds() -> None:
    with socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        ray_cluster = joined_cluster(f"127.0.0.1:{silent.getsockname()[1]}")
    assert (ray_cluster.gpus, ray_cluster.fault) == (None, "it did not answer within 2 s")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(has_gpu(), reason="the GPU of this host decides, and the cluster is not asked")
@pytest.mark.parametrize("gpus", [0, 2])
def test_the_gpus_of_a_running_cluster_choose_the_engine(tmp_path: Path, gpus: int) -> None:
    head, client = free_ports(2)
    address = f"127.0.0.1:{head}"
    words = [f"--port={head}", f"--ray-client-server-port={client}", "--num-cpus=1", f"--num-gpus={gpus}"]
    log = tmp_path / "head.log"
    with ray_head(log, lambda: "Ray runtime started" in log.read_text(), *words, "--include-dashboard=false"):
        assert answers(head)
        command = [sys.executable, str(REPO / "train.py"), *FLAGS.split()]
        environment = {**ENVIRONMENT, "PYTHONPATH": str(REPO), "RAY_ADDRESS": address}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert ended.returncode == 0, ended.stderr
        text = " ".join(ended.stdout.split())
        wrong = {**environment, "RAY_AUTH_TOKEN": "0" * 64}
        refused = subprocess.run(command, env=wrong, capture_output=True, text=True, timeout=200)
    if gpus:
        assert f"engine sglang (the Ray cluster at {address} has 2 GPUs)" in text and "device: cuda" in text
    else:
        assert f"engine torch (this host has no GPU; the Ray cluster at {address} has no GPU)" in text
    assert "are not known (RPC error: InvalidAuthToken" in " ".join(refused.stdout.split())
