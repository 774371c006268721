"""Runs in a cluster that others have started, of two or three hosts: the lost part is named, and nothing is left."""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles.engine.servers.leftovers import NOTED
from tests.fast.run.runs.launches import REPO, importing_from, trained
from tests.fast.support.ray_hosts import Hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

END_SECONDS = 60  # from the loss to the end of the launcher
KILLED_SECONDS = 5  # from the end of the launcher to the end of its workers
ITERATIONS = 4
SERVERS = ["--rollout-engine", "sglang", "--sglang-max-total-tokens", "4096", "--sglang-max-running-requests", "32"]
DIED = r"(the rollout worker|trainer rank 0) died \(with its node {}: .*"
SILENT = r"(the rollout worker|trainer rank 0) \(process \d+\) is lost with its node: Ray's raylet at {}:\d+ has not .*"
GCS, RAYLET = r"Ray's GCS at .* has not answered for \d+ s .*", r"Ray's raylet at .* has not answered for \d+ s .*"


@pytest.fixture
def start_hosts(workplace: Path) -> Iterator[Callable[..., Hosts]]:
    """Return ``start_hosts(*cpus, **environment)``: a cluster, the head first, whose workers find the rewards."""
    started: list[Hosts] = []
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp", ignore_cleanup_errors=True) as folder:

        def start(*cpus: int, **environment: str) -> Hosts:
            path = {"PYTHONPATH": f"{REPO}:{importing_from(workplace)}", "OMP_NUM_THREADS": "1"}
            started.append(Hosts(Path(folder), path | {"RAY_TMPDIR": folder} | environment, cpus))
            return started[-1]

        yield start
        for hosts in started:
            hosts.end()


@pytest.fixture(scope="module")
def whole(launch: Callable[..., Any]) -> dict[int, dict[str, float]]:
    """Return the rows of an uninterrupted run, with its own Ray."""
    run = launch("joined_whole", "--num-rollout", str(ITERATIONS))
    assert run.wait() == 0, run.err
    return {step: trained(row) for step, row in run.rows().items()}


class Joined:
    """A run that waits in its third iteration, with two checkpoints, in a cluster that it has joined."""

    def __init__(self, name: str, hosts: Hosts, launch: Callable[..., Any], workplace: Path, held: Path) -> None:
        self.hosts, self._launch, self._name = hosts, launch, name
        self.checkpoints = workplace / f"{name}_ckpt"
        self.saving = ["--save", str(self.checkpoints), "--save-interval", "1", "--num-rollout", str(ITERATIONS)]
        self._held = held

    def start(self, *flags: str) -> Any:
        run = self._launch(self._name, *self.saving, "--ray-address", self.hosts.address, *flags, **self.hosts.token)
        run.wait_until(lambda: self._held.exists() and (self.checkpoints / "iter_0000002").exists())
        return run

    def resume(self) -> dict[int, dict[str, float]]:
        """Resume with its own Ray; return the rows."""
        run = self._launch(f"{self._name}_resumed", *self.saving, "--load", str(self.checkpoints))
        assert run.wait() == 0, run.err
        return {step: trained(row) for step, row in run.rows().items()}

    def none_left(self) -> bool:
        """Return whether no worker is left on any host, after waiting a little."""
        return not psutil.wait_procs(self.hosts.workers(), timeout=KILLED_SECONDS)[1]


@pytest.fixture
def joined(
    request: pytest.FixtureRequest, start_hosts: Callable[..., Hosts], launch: Callable[..., Any], workplace: Path
) -> Callable[..., Joined]:
    def start(*cpus: int) -> Joined:
        name = re.sub(r"\W+", "_", request.node.name)
        held = workplace / f"{name}.held"
        hosts = start_hosts(*cpus, HOLD_AT="2", HELD=str(held))
        return Joined(name, hosts, launch, workplace, held)

    return start


@pytest.mark.parametrize(
    ("host", "name", "number", "why"),
    [
        ("second", "raylet", signal.SIGKILL, DIED.format("127.0.0.2")),
        ("second", "raylet", signal.SIGSTOP, SILENT.format("127.0.0.2")),
        ("head", "raylet", signal.SIGKILL, DIED.format(r"[\d.]+")),
        ("head", "raylet", signal.SIGSTOP, RAYLET),
        ("head", "gcs_server", signal.SIGKILL, GCS),
        ("head", "gcs_server", signal.SIGSTOP, GCS),
    ],
    ids=[f"{part}-{how}" for part in ("second raylet", "head's raylet", "GCS") for how in ("killed", "stopped")],
)
def test_the_loss_of_a_part_of_the_cluster_is_one_sentence_and_the_run_resumes(
    joined: Callable[..., Joined],
    whole: dict[int, dict[str, float]],
    host: str,
    name: str,
    number: signal.Signals,
    why: str,
) -> None:
    there = joined(1, 1)
    run = there.start()
    began = time.monotonic()
    getattr(there.hosts, host).named(name).send_signal(number)
    assert run.wait() == 1
    assert time.monotonic() - began < END_SECONDS
    resumes = f"; the same command with --load {there.checkpoints} continues from the last checkpoint"
    last = run.err.splitlines()[-1]
    assert re.match(f"train.py: the run stopped: {why}{re.escape(resumes)}", last), run.err
    assert there.none_left() and run.left() == []
    assert there.hosts.second.processes(), "the cluster is not the run's to end"
    rows = there.resume()
    assert rows == {step: row for step, row in whole.items() if step > 4}


def test_a_launcher_that_a_signal_ends_leaves_only_the_cluster(
    start_hosts: Callable[..., Hosts], launch: Callable[..., Any], workplace: Path
) -> None:
    """One after the other, in the same cluster: nothing of a run is in the way of the next."""
    hosts = start_hosts(1, 1)
    of_ray = {process.pid for host in (hosts.head, hosts.second) for process in host.processes()}
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT):
        status = -number if number == signal.SIGKILL else 128 + number
        name = f"joined_{number.name}"
        checkpoints = workplace / f"{name}_ckpt"
        saving = ["--save", str(checkpoints), "--save-interval", "1", "--num-rollout", "1000"]
        run = launch(name, *saving, "--ray-address", hosts.address, **hosts.token)
        run.wait_until(lambda run=run: run.has_rows())
        assert all(host.kinds() for host in (hosts.head, hosts.second)), "workers on both"
        run.process.send_signal(number)
        assert run.wait() == status, run.err
        assert not psutil.wait_procs(hosts.workers(), timeout=KILLED_SECONDS)[1]
        assert run.left() == []
        if number != signal.SIGKILL:
            assert run.err.splitlines()[-1].startswith(f"stopped by {number.name}; the same command with --load ")
        assert of_ray <= {process.pid for host in (hosts.head, hosts.second) for process in host.processes()}


@pytest.mark.parametrize("lost", ["launcher", "raylet"])
def test_nothing_is_left_of_an_engine_whose_launcher_or_raylet_is_killed(
    start_hosts: Callable[..., Hosts], launch: Callable[..., Any], workplace: Path, lost: str
) -> None:
    pytest.importorskip("sglang")
    hosts = start_hosts(1, 1)
    run = launch(f"engine_of_{lost}", *SERVERS, "--num-rollout", "1000", "--ray-address", hosts.address, **hosts.token)
    run.wait_until(run.has_rows)
    noted = list(hosts.folder.glob(f"ray-*/*/*/{NOTED}"))
    assert len(noted) == 1, "the folder of the engine"
    segments = [Path(name) for name in noted[0].read_text().split()]
    assert any(segment.exists() for segment in segments)
    if lost == "launcher":
        run.process.kill()
    else:
        next(host for host in (hosts.head, hosts.second) if "EngineActor" in host.kinds()).named("raylet").kill()
    run.wait()
    assert not psutil.wait_procs(hosts.workers(), timeout=KILLED_SECONDS)[1]
    assert not any(segment.exists() for segment in segments)
    assert not list(hosts.folder.glob("ray-*/*/lock"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_goes_on_with_other_devices_of_the_cluster(
    joined: Callable[..., Joined], whole: dict[int, dict[str, float]], number: signal.Signals
) -> None:
    there = joined(1, 1, 1)
    run = there.start("--max-restarts", "1")
    next(host for host in there.hosts.others if host.kinds()).named("raylet").send_signal(number)
    assert run.wait() == 0, run.err
    assert "restarting from its last checkpoint (0 restarts left)" in run.err
    assert {step: trained(row) for step, row in run.rows().items()} == whole
    assert there.none_left() and run.left() == []
