"""A command that is submitted to a Ray cluster as a job: it starts, logs, returns its exit code and can be stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fast.support.ray_head import ENVIRONMENT, RAY, answers, free_ports, ray_head

REPO = Path(__file__).resolve().parents[4]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a cluster; give the address that takes jobs."""
    from ray._private.utils import get_dashboard_dependency_error

    if get_dashboard_dependency_error() is not None:
        pytest.skip("a cluster takes jobs with the packages of ray[default] only")
    gcs, board, client = free_ports(3)
    words = ["--num-cpus=3", f"--port={gcs}", f"--dashboard-port={board}", f"--ray-client-server-port={client}"]
    # The dashboard takes longer to start than the rest.
    with ray_head(tmp_path_factory.mktemp("ray") / "head.log", lambda: answers(board), *words):
        yield f"http://127.0.0.1:{board}"


Submit = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def submit(dashboard: str, workplace: Path, tiny_model: str, tmp_path: Path) -> Submit:
    """Return a call that submits a run with a working directory and a runtime environment, as scripts do."""

    def run(*words: str, iterations: int = 2, job: str = "", wait: bool = True) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
        runtime = {"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}}
        flags = f"--hf-checkpoint {tiny_model} --prompt-data prompts.jsonl --apply-chat-template --label-key label "
        flags += "--custom-rm-path launch_rewards:spread --rollout-batch-size 4 --n-samples-per-prompt 4 "
        flags += "--rollout-max-response-len 6 --actor-num-gpus-per-node 1 --device cpu --fp32 "
        flags += f"--num-rollout {iterations} --output-dir {tmp_path / 'out'}"
        command = [*RAY, "job", "submit", "--address", dashboard, "--working-dir", str(workplace)]
        command += ["--runtime-env-json", json.dumps(runtime), *(["--submission-id", job] if job else [])]
        command += [] if wait else ["--no-wait"]
        command += ["--", sys.executable, str(REPO / "train.py"), *flags.split(), *words]
        return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)

    return run


def test_a_job_runs_and_its_log_is_streamed(submit: Submit, tmp_path: Path) -> None:
    ended = submit()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step 2" in ended.stdout and "succeeded" in ended.stdout
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]


def test_a_wrong_flag_fails_the_job_with_its_message(submit: Submit) -> None:
    ended = submit("--rollout-bach-size", "4")
    assert ended.returncode != 0
    assert "--rollout-bach-size: no such flag" in ended.stdout + ended.stderr


def test_a_job_can_be_stopped(submit: Submit, dashboard: str, tmp_path: Path) -> None:
    assert submit(iterations=10_000, job="endless", wait=False).returncode == 0
    rows = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (rows.exists() and rows.read_text()):
        assert time.monotonic() < deadline, "the job did not get to its first step"
        time.sleep(0.5)
    stopped = subprocess.run(
        [*RAY, "job", "stop", "--address", dashboard, "endless"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    status = [*RAY, "job", "status", "--address", dashboard, "endless"]
    result = subprocess.run(status, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert "was stopped" in result.stdout + result.stderr
