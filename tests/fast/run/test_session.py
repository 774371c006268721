"""How a local Ray is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private.node import Node

from miles.config.cluster import ClusterArguments
from miles.run.placement import GpuSlot
from miles.run.session import EngineLayout, Placement, ray_session
from miles.run.stop_requests import STOPS, StopRequests

LAUNCHER = """
import sys
from pathlib import Path
import miles.run.failures, miles.run.resume, miles.run.placement, miles.run.rollout_actor
import miles.run.session, miles.run.train_actor, miles.run.loop, miles.observe.report.sink
from miles.config.cluster import ClusterArguments
from miles.observe.sinks import TensorBoardSink

miles.run.session.resolve_device(ClusterArguments(device="cpu"))
sink = TensorBoardSink(Path(sys.argv[1]), resume_step=3)
sink.log(3, {"train/loss": 0.5})
sink.close()
print({"torch", "transformers"} & sys.modules.keys())
"""


def test_the_launcher_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """Its processes import them while it starts Ray and waits."""
    ended = subprocess.run([sys.executable, "-c", LAUNCHER, str(tmp_path)], capture_output=True, text=True)
    assert ended.stdout == "set()\n", ended.stderr


IMPATIENT = """
import signal, ray
from miles.config.cluster import ClusterArguments
from miles.run.session import ray_session
from miles.run.stop_requests import StopRequests

def init(**options):
    print("starting", flush=True)
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    print("never reached", flush=True)

ray.init = init
with StopRequests(60).listening(), ray_session(ClusterArguments(device="cpu")):
    pass
"""


class Started(Exception):
    """Ends the session where Ray would start."""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_a_run_on_cpu_bounds_the_object_store(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    """A GPU trains models that are larger than any bound that suits a CPU, and an update holds the whole model."""
    arguments: dict[str, Any] = {}

    def init(**options: Any) -> None:
        arguments.update(options)
        raise Started

    monkeypatch.setattr(ray, "init", init)
    cluster = ClusterArguments(device=device, actor_num_gpus_per_node=2)
    with pytest.raises(Started), ray_session(cluster):
        pass
    limits = arguments["num_cpus"], arguments["object_store_memory"]
    assert limits == ((3, 2**30) if device == "cpu" else (None, None))


@pytest.mark.parametrize("value", [None, "500"])
def test_a_local_ray_records_no_task_events(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """Unless the user wants them. In this process the environment is as before afterwards."""
    name = "RAY_task_events_report_interval_ms"
    if value is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, value)
    values: list[str] = []

    def init(**options: Any) -> None:
        values.append(os.environ[name])
        raise Started

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(Started), ray_session(ClusterArguments(device="cpu")):
        pass
    assert values == [value or "0"] and os.environ.get(name) == value


def test_only_the_ray_of_a_run_lacks_autoscaler_and_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one in this process has both. ``test_train_and_resume`` looks at the processes of a run."""
    before = Node.start_monitor, Node.start_api_server
    methods: list[Any] = []

    def init(**options: Any) -> None:
        methods.extend([Node.start_monitor, Node.start_api_server])
        raise Started

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(Started), ray_session(ClusterArguments(device="cpu")):
        pass
    assert not set(before) & set(methods)
    assert (Node.start_monitor, Node.start_api_server) == before


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_while_ray_starts_stops_the_run_when_it_has_started(
    monkeypatch: pytest.MonkeyPatch, number: int, fails: bool
) -> None:
    """As it starts, Ray sets a handler for SIGTERM that exits, and native code that calls Python may not raise."""
    passed: list[str] = []

    def init(**options: Any) -> None:
        ray._private.utils.set_sigterm_handler(lambda *_: sys.exit(15))
        signal.raise_signal(number)
        passed.append("the signal")
        if fails:
            raise RuntimeError("the signal ended a part of Ray too: timed out during startup")

    monkeypatch.setattr(ray, "init", init)
    before, stop = signal.getsignal(number), StopRequests(60)
    with stop.listening():
        handler = signal.getsignal(number)
        with pytest.raises(KeyboardInterrupt), ray_session(ClusterArguments(device="cpu")):
            passed.append("the session")
        assert signal.getsignal(number) is handler
    assert passed == ["the signal"] and stop.number == number
    assert signal.getsignal(number) is before


def test_a_second_signal_while_ray_starts_ends_the_launcher_at_once(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IMPATIENT],
        env=os.environ | {"RAY_TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (143, "starting\n"), ended.stderr
    assert ended.stderr == "miles train: stopped by SIGTERM while Ray was starting\n"
    assert [path for path in tmp_path.glob("ray-*/*") if path.is_dir()] == []


@pytest.mark.slow
@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_stopped_while_ray_starts_says_so(launch: Any, part: str, number: int, status: int) -> None:
    run = launch(f"starting_{part}_{number}")
    children = psutil.Process(run.process.pid).children
    run.wait_until(lambda: any(child.name() == part for child in children()))
    run.process.send_signal(number)
    assert run.wait() == status, run.err
    assert run.err.splitlines()[-1].startswith("stopped by ")
    assert run.none_left(), run.left()


def test_without_a_trainer_all_bundles_are_for_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {}

    def place(bundles: list[dict[str, float]], **options: Any) -> None:
        arguments.update(bundles=bundles)
        raise Started

    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr("miles.run.session.parts_of_ray", dict)
    monkeypatch.setattr("miles.run.session.own_node", lambda: None)
    monkeypatch.setattr("miles.run.session.placement_group", place)
    cluster = ClusterArguments(device="cuda", actor_num_gpus_per_node=2, ray_address="auto")
    with pytest.raises(Started), ray_session(cluster, EngineLayout(2, 4, with_trainer=False)):
        pass
    assert arguments["bundles"] == [{"CPU": 1.0, "GPU": 4.0}] * 2
    placement = Placement(None, cluster, "cuda", EngineLayout(2, 4, with_trainer=False))  # type: ignore[arg-type]
    assert placement.engine_options(1)["scheduling_strategy"].placement_group_bundle_index == 1
    assert placement.engine_options(1)["num_gpus"] == 4.0 and placement.rollout_options()["num_gpus"] == 0.0


def test_colocated_engines_have_the_gpus_of_consecutive_ranks() -> None:
    slots = tuple(GpuSlot(bundle, "a", gpu) for bundle, gpu in ((2, "0"), (0, "1"), (3, "5"), (1, "7")))
    cluster = ClusterArguments(device="cuda", actor_num_gpus_per_node=4, colocate=True)
    placement = Placement(None, cluster, "cuda", EngineLayout(2, 2), slots)  # type: ignore[arg-type]
    assert [placement.engine_gpus(number) for number in range(2)] == [("0", "1"), ("5", "7")]
    indices = [placement.trainer_options(r)["scheduling_strategy"].placement_group_bundle_index for r in range(4)]
    assert indices == [2, 0, 3, 1]
    assert placement.engine_options(1)["scheduling_strategy"].placement_group_bundle_index == 3
    assert placement.engine_options(1)["num_gpus"] == 0.5
    spanning = Placement(None, cluster, "cuda", EngineLayout(1, 4, nodes=2), slots)  # type: ignore[arg-type]
    assert [spanning.engine_gpus(0, node) for node in range(2)] == [("0", "1"), ("5", "7")]
    bundles = [spanning.engine_options(0, node)["scheduling_strategy"] for node in range(2)]
    assert [strategy.placement_group_bundle_index for strategy in bundles] == [2, 3]


def test_ray_that_never_starts_in_time_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(**options: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    rule = "Ray did not start on this machine within 30 s, 3 times in a row; .* give --ray-address"
    with pytest.raises(ValueError, match=rule), ray_session(ClusterArguments(device="cpu")):
        pass
    assert capsys.readouterr().err.count("trying again") == 2


SLOW_START = """
import psutil, ray
from miles.config.cluster import ClusterArguments
from miles.run.session import ray_session

found = ray._private.services.get_node
starts = []

def get_node(*given):
    starts.append([child.pid for child in psutil.Process().children()])
    if len(starts) == 1:
        raise Exception("The current node timed out during startup.")
    return found(*given)

ray._private.services.get_node = get_node
with ray_session(ClusterArguments(device="cpu")):
    first, second = map(set, starts[:2])
    print(len(first), len(second), len(first & second))
"""


@pytest.mark.slow
def test_nothing_of_a_start_that_took_too_long_is_left_beside_the_next_one() -> None:
    ended = subprocess.run([sys.executable, "-c", SLOW_START], capture_output=True, text=True)
    first, second, in_both = map(int, ended.stdout.split())
    assert first == second > 3 and in_both == 1, "only the guard of the run is in both"
