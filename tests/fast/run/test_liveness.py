"""Waiting for workers that die, hang or fail, with real processes."""

import os
import signal
from contextlib import suppress

import psutil
import pytest
import ray

from miles.run import liveness
from miles.run.failures import in_one_line
from miles.run.liveness import ActorLost, Workers, with_heartbeat
from tests.fast.run.actors.sleepers import FOR_EVER, Silent, Sleeper
from tests.fast.run.actors.small_ray import small_ray


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with small_ray(num_cpus=2):
        yield


@pytest.fixture(scope="module")
def idle():
    """Return the workers of earlier tests that are still alive: it takes a second of the processor to start one."""
    return []


@pytest.fixture
def crew(monkeypatch, idle):
    """Return two workers that count as lost after 3 s without a heartbeat, and their process ids."""
    monkeypatch.setattr(liveness, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(liveness, "BLAME_SECONDS", 2.0)
    workers = Workers(seconds=3.0)
    actors = [idle.pop() if idle else with_heartbeat(Sleeper).options(num_cpus=1).remote() for _ in range(2)]
    for number, actor in enumerate(actors):
        workers.add(f"worker {number}", actor)
    yield workers, actors, ray.get([actor.heartbeat.remote(0) for actor in actors])
    for actor in actors:
        with suppress(ray.exceptions.RayError):  # the test has ended it
            ray.get(actor.wake.remote())
            ray.get(actor.rest.remote())
            idle.append(actor)


def test_a_call_that_takes_too_long_ends_the_wait_and_shows_where_its_worker_is(crew):
    workers, (first, second), pids = crew
    calls = []
    bounded = Workers(seconds=600.0, longest_wait=1.0, on_hang=lambda why: calls.append((why, bounded.describe(60.0))))
    for name, actor in (("slow", first), ("idle", second)):
        bounded.add(name, actor)
    bounded.results([first.sleep.remote(0), second.sleep.remote(0)])
    with pytest.raises(ActorLost, match=r"has not ended within 1 s \(--wait-timeout\)"):
        bounded.results([first.sleep.remote(FOR_EVER)])
    ((why, described),) = calls
    assert "--wait-timeout" in why and described.keys() == {"slow", "idle"}
    assert " in sleep" in described["slow"] and " in sleep" not in described["idle"]
    assert workers.results([second.sleep.remote(0)]) == [0]


@pytest.mark.parametrize(
    ("error", "hangs"), [("Timed out waiting 1000ms for recv operation", True), ("a fault", False)]
)
def test_a_failure_that_is_a_time_out_is_a_hang(crew, error, hangs):
    workers, (first, _), _ = crew
    reasons = []
    workers.on_hang = reasons.append
    with pytest.raises(RuntimeError, match=error):
        workers.results([first.fail.remote(RuntimeError(error))])
    assert reasons == ([error] if hangs else [])


def test_silence_counts_from_the_end_of_the_imports(crew):
    workers, (first, _), _ = crew
    second = with_heartbeat(Silent).options(num_cpus=0).remote()
    workers.add("importing", second, preparing=second.sleep.remote(5.0))
    assert workers.results([first.sleep.remote(4.5)]) == [4.5]  # longer than its silence may last
    with pytest.raises(ActorLost, match="importing .* no sign of life"):
        workers.results([first.sleep.remote(FOR_EVER)])
    replaced = []
    workers.on_replacement = lambda: replaced.append(True)
    workers.replace(second)
    assert replaced == [True]


def test_the_death_of_a_worker_that_nobody_waits_for_ends_the_wait(crew):
    workers, (first, second), (pid, _) = crew
    workers.results([first.sleep.remote(0), second.sleep.remote(0)])
    waits = second.sleep.remote(FOR_EVER)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorLost, match=r"worker 0 died \(out of memory, killed from outside, or ended by") as lost:
        workers.results([waits])
    assert lost.value.worker is first
    assert isinstance(lost.value.__cause__, ray.exceptions.RayActorError)


def test_a_worker_that_code_in_it_has_ended_is_not_blamed_on_memory_alone(crew):
    workers, (first, _), _ = crew
    with pytest.raises(ActorLost, match=r"worker 0 died \(.*, or ended by code of yours, as os\._exit does\)"):
        workers.results([first.leave.remote()])


def test_a_fault_of_native_code_is_named_and_an_instruction_that_is_missing_has_a_remedy(crew):
    workers, (first, second), (pid, other) = crew
    workers.results([first.sleep.remote(0), second.sleep.remote(0)])
    os.kill(pid, signal.SIGILL)
    with pytest.raises(ActorLost, match=r"worker 0 died \(SIGILL: .* set ONEDNN_MAX_CPU_ISA=AVX2 in the environment"):
        workers.results([second.sleep.remote(FOR_EVER)])
    with pytest.raises(ray.exceptions.RayActorError) as death:
        ray.get(first.sleep.remote(0))
    assert in_one_line(death.value).startswith("a worker process died (SIGILL: ")
    workers.end(first)
    os.kill(other, signal.SIGSEGV)
    with pytest.raises(ActorLost, match=r"worker 1 died \(SIGSEGV: a fault of native code"):
        workers.results([second.sleep.remote(FOR_EVER)])


def test_the_death_of_a_replaceable_worker_is_reported_to_who_waits_for_it(crew):
    workers, (first, second), _ = crew
    third = with_heartbeat(Sleeper).options(num_cpus=0).remote()
    workers.add("worker 2", third, replaceable=True)
    [pid] = workers.results([third.heartbeat.remote(0)])
    waits = third.sleep.remote(FOR_EVER)
    os.kill(pid, signal.SIGKILL)
    assert workers.results([first.sleep.remote(1), second.sleep.remote(0)]) == [1, 0]
    with pytest.raises(ActorLost, match="worker 2 died"):
        workers.results([waits], whose=third)
    workers.end(third)


def test_a_stopped_worker_is_lost_and_its_process_is_killed(crew):
    workers, (first, second), (_, pid) = crew
    workers.results([first.sleep.remote(0), second.sleep.remote(0)])
    stopped = psutil.Process(pid)
    stopped.suspend()
    with pytest.raises(ActorLost, match=rf"worker 1 \(process {pid}\) has shown no sign of life for 3 s") as lost:
        workers.results([first.sleep.remote(FOR_EVER)])
    assert lost.value.worker is second
    workers.end(second)
    psutil.wait_procs([stopped], timeout=60)
    assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE


def test_a_failure_is_reported_unchanged(crew):
    workers, (first, second), _ = crew
    with pytest.raises(ValueError, match="a wrong flag"):
        workers.results([second.sleep.remote(FOR_EVER), first.fail.remote(ValueError("a wrong flag"))])
    with pytest.raises(KeyError, match="gold"):
        workers.results([second.sleep.remote(0)], alongside=[first.fail.remote(KeyError("gold"))])


def test_a_failure_caused_by_a_dead_peer_names_the_dead_peer(crew):
    workers, (first, second), (_, pid) = crew
    fails = first.fail.remote(RuntimeError("connection closed by peer"))
    ray.wait([fails])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorLost, match="worker 1 died"):
        workers.results([fails, second.sleep.remote(FOR_EVER)])
