"""The watch over Ray's own processes, with other processes in their place. Starts no Ray."""

import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from miles.run import ray_watch
from miles.run.liveness import end_of
from miles.run.ray_watch import Listener, OwnNode, OwnProcess, RayWatch


@pytest.fixture
def process():
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        yield process
        process.kill()


def test_a_killed_process_is_reported_once_and_at_once(process):
    losses = queue.Queue()
    watch = RayWatch([OwnProcess("Ray's GCS", psutil.Process(process.pid))], losses.put)
    process.kill()  # nobody has waited for it: a zombie
    assert losses.get(timeout=60) == f"Ray's GCS (process {process.pid}) died (out of memory, or killed from outside)"
    watch.look()
    watch.end()
    assert losses.empty()


def test_nothing_is_reported_after_the_end(process):
    losses = []
    watch = RayWatch([OwnProcess("Ray's GCS", psutil.Process(process.pid))], losses.append)
    watch.end()
    process.kill()
    process.wait()
    watch.look()
    assert losses == []


def test_a_death_just_before_the_end_is_reported(process, monkeypatch):
    monkeypatch.setattr(ray_watch, "LOOK_SECONDS", 600.0)
    losses = []
    watch = RayWatch([OwnProcess("Ray's raylet", psutil.Process(process.pid))], losses.append)
    process.kill()
    process.wait()
    watch.end_with_ray()
    assert len(losses) == 1


def test_a_stopped_process_is_reported_after_a_while_and_not_when_it_continues(process, monkeypatch):
    part = OwnProcess("Ray's raylet", psutil.Process(process.pid))
    now = time.monotonic()
    monkeypatch.setattr(ray_watch.time, "monotonic", lambda: now)
    assert part.loss() is None
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    now += ray_watch.LOST_SECONDS - 1
    assert part.loss() is None
    process.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
    now += 5
    assert part.loss() is None
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    now += ray_watch.LOST_SECONDS + 1
    assert "has been stopped for 30 s" in part.loss()


def test_a_stopped_process_continues_at_the_end(process):
    """Ray's shutdown would wait for it without a limit."""
    watch = RayWatch([OwnProcess("Ray's GCS", psutil.Process(process.pid))], [].append)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    watch.end_with_ray()
    os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
    assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED


@pytest.mark.parametrize("is_own", [True, False])
def test_a_part_that_does_not_answer_at_the_end_is_reported_if_it_is_the_runs_own(is_own):
    losses = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        watch = RayWatch([Listener("Ray's GCS", server.getsockname(), is_own)], losses.append)
        watch.look()
        server.close()
        watch.end_with_ray()
    assert bool(losses) == is_own


@pytest.mark.parametrize("is_late", [True, False])
def test_a_part_that_ends_while_ray_shuts_down_is_reported_until_ray_ends_it(monkeypatch, is_late):
    """After a signal to all processes the GCS may end late; Ray's shutdown would wait for it for a minute."""
    losses, killed = queue.Queue(), []
    node = SimpleNamespace(kill_all_processes=lambda wait: killed.append(wait))
    monkeypatch.setattr(ray_watch, "CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(ray_watch.ray_worker, "_global_node", node)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        watch = RayWatch([Listener("Ray's GCS", server.getsockname(), is_own=True)], losses.put)
        watch.end_with_ray()
        assert losses.empty() and killed == []
        if is_late:
            server.close()
            assert "Ray's GCS at 127.0.0.1:" in losses.get(timeout=60)
        node.kill_all_processes(wait=False)
    watch.look()
    assert losses.empty() and killed == [False]


@pytest.mark.parametrize(("kind", "how"), [("path", "dies"), ("port", "dies"), ("port", "stops")])
def test_a_process_of_ray_is_lost_when_it_answers_no_more(monkeypatch, kind, how):
    """One that is stopped has a kernel that still accepts connections, but answers nothing."""
    now = time.monotonic()
    monkeypatch.setattr(ray_watch.time, "monotonic", lambda: now)
    monkeypatch.setattr(ray_watch, "CONNECT_SECONDS", 0.2)
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX if kind == "path" else socket.AF_INET) as server,
    ):
        server.bind(f"{folder}/raylet" if kind == "path" else ("127.0.0.1", 0))
        server.listen()
        answering = threading.Thread(target=answer_once, args=(server,))
        if kind == "port":
            answering.start()
        part = Listener("Ray's raylet", server.getsockname(), is_own=kind == "path")
        now += 100.0
        assert part.loss() is None
        if kind == "port":
            answering.join()
        if how == "dies":
            server.close()
        now += ray_watch.LOST_SECONDS - 1
        assert part.loss() is None, "it may come back"
        now += 0.1
        assert part.loss() is None, "it is asked every few seconds only"
        now += 1 + ray_watch.CONNECT_SECONDS
        assert "Ray's raylet at" in (loss := part.loss()) and "has not answered for" in loss


def answer_once(server):
    with server.accept()[0] as asked:
        asked.send(b"an answer")


def test_a_node_that_has_signed_off_is_the_cause_of_a_workers_death(monkeypatch):
    """As after SIGTERM of the raylet: it is still there, and its workers have ended."""
    nodes = [{"NodeID": "other", "Alive": False}, {"NodeID": "own", "Alive": True}]
    monkeypatch.setattr(ray_watch.ray, "nodes", lambda: nodes)
    losses = []
    watch = RayWatch([], losses.append, OwnNode(7, "own"))
    ray_watch.look_at_node()
    assert losses == []
    nodes[1] |= {"Alive": False, "DeathReasonMessage": "received SIGTERM"}
    for _ in range(2):
        ray_watch.look_at_node()
    assert losses == ["Ray's raylet (process 7) died (received SIGTERM), and its workers with it"]
    watch.end()
    ray_watch.look_at_node()
    assert len(losses) == 1 and not ray_watch.is_hang(losses[0])


@pytest.mark.parametrize(
    ("text", "end"),
    [(b"one\ntwo\n", b"one\ntwo\n"), (b"x" * 90 + b"\nlast\n", b"last\n"), (b"x" * 90, b"x" * 40)],
    ids=["a short file", "whole lines", "one long line, as of a progress bar"],
)
def test_the_end_of_a_log_is_never_empty(tmp_path, text, end):
    (tmp_path / "log").write_bytes(text)
    assert end_of(tmp_path / "log", 40) == end
