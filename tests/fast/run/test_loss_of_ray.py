"""The report and the end of a launcher whose Ray is gone. Starts no Ray."""

import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import ray.exceptions

from miles.config.checkpoint import CheckpointArguments
from miles.config.parser import parse
from miles.run import launcher as run
from miles.run import stop_requests
from miles.run.failures import ActorLost, exit_with_message
from miles.run.restarts import Restarts, with_restarts
from miles.run.session import keeping_logs
from miles.run.stop_requests import StopRequests

GONE = "Ray's GCS at 127.0.0.1:7 has not answered for 3 s (Connection refused)"


class Files:
    """Record the reports that are kept of a failure; ``fault`` is raised instead."""

    def __init__(self, fault=None):
        self.fault = fault
        self.kept = []

    def report_hang(self, why, ask_ray):
        self._keep("report")

    def keep_ray_logs(self):
        self._keep("logs")

    def next_attempt(self):
        self.kept.append("next attempt")

    def in_words(self):
        return ""

    def _keep(self, what):
        self.kept.append(what)
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def context():
    """Return the context of a run that may be restarted once."""
    sent = []
    return SimpleNamespace(
        stop=StopRequests(60.0),
        files=Files(),
        notifier=SimpleNamespace(send=lambda *event: sent.append(event), sent=sent),
        restarts=Restarts(1),
        continuation=lambda settings: "a continuation",
        of_command=CheckpointArguments(),
    )


@pytest.fixture(autouse=True)
def no_long_wait(monkeypatch):
    monkeypatch.setattr(stop_requests, "SIGNAL_SECONDS", 0.05)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_that_has_ended_ray_too_is_the_reason(context, capsys, number, status):
    with context.stop.listening():
        with suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        assert run.after_loss(GONE, parse([]), context) == status
    output = capsys.readouterr().err
    assert output.startswith(f"stopped by {signal.Signals(number).name}; nothing was saved") and "GCS" not in output
    assert context.files.kept == [] and context.restarts.left == 1
    assert [event for event, _ in context.notifier.sent] == ["end"]


def test_a_signal_counts_before_python_has_called_its_handler(context, monkeypatch):
    monkeypatch.setattr(context.stop, "_stop", lambda number, frame: None)  # as if it had not been called yet
    with context.stop.listening():
        signal.raise_signal(signal.SIGTERM)
        assert not context.stop.is_requested
        assert run.after_loss(GONE, parse([]), context) == 143
    assert context.files.kept == []


def test_a_signal_that_comes_a_little_later_counts_and_only_ends_the_wait():
    stop, answers = StopRequests(60.0), queue.SimpleQueue()
    thread = threading.Thread(target=lambda: answers.put(stop.stopped_within(30.0, only_notes=True)))
    with stop.listening():
        thread.start()
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            thread.join()
        thread.join()
        signal.raise_signal(signal.SIGTERM)  # raises no more: the run ends
    assert answers.get() is True and stop.exit_status == 143


def test_the_warning_of_slurm_does_not_hide_a_loss(context, capsys):
    with context.stop.listening():
        signal.raise_signal(signal.SIGUSR1)
        assert run.after_loss(GONE, parse([]), context) == 1
    assert f"the run stopped: {GONE}" in capsys.readouterr().err
    assert context.files.kept == ["report", "logs"] and context.restarts.left == 1


def test_without_a_signal_the_run_is_restarted(context):
    assert run.after_loss(GONE, parse([]), context) == "a continuation"
    assert context.files.kept == ["report", "logs", "next attempt"] and context.restarts.left == 0


def test_the_workers_of_a_joined_cluster_end_themselves(context, capsys):
    """Ray cannot end them, and no guard does. A report would show this process only."""
    ended = []
    context.continuation, context.files.workers = None, SimpleNamespace(end_directly=lambda: ended.append(True))
    assert run.after_loss(GONE, parse(["--ray-address", "10.0.0.1:6379"]), context) == 1
    assert ended == [True] and context.files.kept == ["logs"] and context.restarts.left == 1
    assert f"the run stopped: {GONE}" in capsys.readouterr().err


def test_what_cannot_be_kept_or_restarted_does_not_replace_the_reason(context, capsys):
    context.files = Files(RuntimeError("a fault"))

    def continuation(settings):
        raise RuntimeError("not this one")

    context.continuation = continuation
    assert run.after_loss(GONE, parse([]), context) == 1
    output = capsys.readouterr().err
    assert output.count("could not be kept (RuntimeError: a fault)") == 2
    assert f"the run stopped: {GONE}, and the run cannot be restarted: not this one" in output


def test_a_worker_that_a_signal_has_ended_is_no_failure(capsys):
    stop, settings = StopRequests(60.0), parse(["--max-restarts", "1"])
    attempts = []

    def attempt(settings):
        attempts.append(settings)
        raise ActorLost(None, "trainer rank 0 died")

    with stop.listening(), stop.finish_first(), pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
        with exit_with_message(settings.checkpoint, stop):
            with_restarts(settings, attempt, Restarts(1), Files(), stop)
    assert ended.value.code == 143 and len(attempts) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("stopped by SIGTERM;")


@pytest.fixture
def death_first(monkeypatch):
    """Return the requests of a run whose launcher sees the death of a worker before the signal that has caused it."""
    stop = StopRequests(60.0)

    def arrives(seconds, **more):
        signal.raise_signal(signal.SIGTERM)
        return type(stop).stopped_within(stop, seconds, **more)

    monkeypatch.setattr(stop, "stopped_within", arrives)
    return stop


@pytest.mark.parametrize("finishing", [True, False])
def test_no_logs_are_kept_and_nothing_restarts_after_a_signal_that_a_worker_has_died_of(death_first, finishing, capsys):
    files, settings, attempts = Files(), parse(["--max-restarts", "1"]), []

    def attempt(settings):
        attempts.append(settings)
        raise ray.exceptions.ActorDiedError

    with death_first.listening(), death_first.finish_first() if finishing else nullcontext():
        message = exit_with_message(settings.checkpoint, death_first)
        with pytest.raises(SystemExit) as ended, message, keeping_logs(files, death_first):
            with_restarts(settings, attempt, Restarts(1), files, death_first)
    assert ended.value.code == 143 and len(attempts) == 1 and files.kept == []
    assert capsys.readouterr().err.splitlines()[-1].startswith("stopped by SIGTERM;")


def test_a_worker_that_died_by_itself_leaves_later_signals_to_the_run():
    stop, files = StopRequests(60.0), Files()
    with stop.listening():
        with pytest.raises(ActorLost), keeping_logs(files, stop):
            raise ActorLost(None, "trainer rank 0 died")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert files.kept == ["logs"]


@pytest.mark.parametrize("error", [OSError("its own failure"), ActorLost(None, "trainer rank 0 died")], ids=repr)
def test_the_logs_of_a_failure_are_kept(error):
    stop, files = StopRequests(60.0), Files()
    with stop.listening(), pytest.raises(type(error)), keeping_logs(files, stop):
        raise error
    assert files.kept == ["logs"]


RAISES = """
import sys
from types import SimpleNamespace
import ray
from miles.config.cluster import ClusterArguments
from miles.run import session

ended = []
session.ray.init = lambda **options: None
session.parts_of_ray = list
session.own_node = lambda: None

class Watch:
    def __init__(self, parts, on_loss, node):
        on_loss("Ray's GCS died")

session.RayWatch = Watch

def on_loss(loss):
    raise RuntimeError("a fault in what reports " + loss)

with session.ray_session(ClusterArguments(device="cpu", ray_address="auto"), on_loss=on_loss):
    pass
sys.exit(7)
"""


def test_a_run_ends_even_if_its_last_words_fail():
    ended = subprocess.run([sys.executable, "-c", RAISES], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.splitlines()[-1] == "RuntimeError: a fault in what reports Ray's GCS died"
