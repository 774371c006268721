"""Real server processes: how they stop, that none outlives its parent, and how many files they may open."""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from miles.engine.base import ServerFailed
from miles.engine.servers.processes import SPARE_FILES, ChildProcess, LogFile, allow_open_files, free_port
from miles.engine.sglang import router as router_module
from miles.engine.sglang.router import Router

SERVES = "import sys, time; print('serving', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SERVES
WITH_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SERVES!r}]); " + SERVES
PARENT = """
import os, pathlib, sys
from miles.engine.servers.processes import ChildProcess
from miles.engine.servers.processes import LogFile
child = ChildProcess("fake_child", [], os.environ, LogFile(pathlib.Path(sys.argv[1])))
child.wait_until(lambda: "serving" in child.log.path.read_text(), 60)
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path):
    """Return ``start(source)``: run the source as a module with its own name. It is stopped at the end."""
    started = []

    def run(source, arguments=(), secret_arguments=()):
        (tmp_path / "fake_child.py").write_text(source)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
        log = LogFile(tmp_path / "logs" / "server.log")
        started.append(ChildProcess("fake_child", arguments, environment, log, secret_arguments))
        return started[-1]

    yield run
    for child in started:
        child.stop(grace_seconds=0)


def serves(child):
    return lambda: "serving" in child.log.path.read_text()


def test_server_that_handles_sigterm_ends(start):
    child = start(SERVES)
    child.wait_until(serves(child), 60)
    child.stop(grace_seconds=30)
    assert not psutil.pid_exists(child.pid)


def test_server_that_ignores_sigterm_is_killed(start):
    child = start(STUBBORN)
    child.wait_until(serves(child), 60)
    child.stop(grace_seconds=0.1)
    assert not psutil.pid_exists(child.pid)


def test_secret_arguments_arrive_and_are_shown_nowhere(tmp_path, start):
    source = "import sys; print('got', sys.argv[1:], 'and stdin', repr(sys.stdin.read()), flush=True); " + SERVES
    child = start(source, ["--port", "7"], ["--api-key", "open-sesame"])
    child.wait_until(serves(child), 60)
    process = psutil.Process(child.pid)
    assert "open-sesame" not in " ".join(process.cmdline()) + str(process.environ())
    child.stop(grace_seconds=0)
    assert "got ['--port', '7', '--api-key', '(hidden)'] and stdin ''" in child.log.path.read_text()


def test_stop_ends_the_whole_process_group(start):
    child = start(WITH_CHILD)
    child.wait_until(lambda: child.log.path.read_text().count("serving") == 2, 60)
    family = psutil.Process(child.pid).children()
    child.stop(grace_seconds=30)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert len(family) == 1
    assert not alive


def test_early_end_shows_the_log_of_this_start_only(start):
    first = start("print('of the first start')")
    with pytest.raises(ServerFailed, match="of the first start"):
        first.wait_until(lambda: False, 60)
    second = start("raise SystemExit('no such model')")
    with pytest.raises(ServerFailed, match="(?s)ended with status 1 .*server.log ends:\nno such model") as failure:
        second.wait_until(lambda: False, 60)
    assert "first" not in str(failure.value)


def test_server_that_never_serves_is_stopped(start):
    child = start(SERVES)
    with pytest.raises(ServerFailed, match="did not serve within 1 s"):
        child.wait_until(lambda: False, 1)
    assert not psutil.pid_exists(child.pid)


def test_a_server_that_is_asked_slowly_has_no_longer_than_that(start):
    """As one that takes the connection and hangs: each question takes as long as it waits for an answer."""
    child, asked = start(SERVES), []

    def hangs():
        asked.append(time.monotonic())
        time.sleep(1)
        return False

    with pytest.raises(ServerFailed, match="did not serve within 2 s"):
        child.wait_until(hangs, 2)
    assert len(asked) <= 2


def test_server_dies_with_its_parent(tmp_path):
    (tmp_path / "fake_child.py").write_text(SERVES)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, text=True, **pipes) as parent:
        server = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs([server], timeout=60)
    assert not alive


@contextmanager
def lowest_soft_limit(room):
    """Allow the fewest open files while the body runs; yield the hard limit, which must leave ``room``."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, hard = before
    if hard == resource.RLIM_INFINITY or hard < SPARE_FILES + room:
        pytest.skip(f"the hard limit of this system is {hard}")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (SPARE_FILES, hard))
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_and_the_hard_one_reported():
    with lowest_soft_limit(room=600) as hard:
        allow_open_files(500, "--flag 500")
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (SPARE_FILES + 500, hard)
        with pytest.raises(ValueError, match=f"--flag 9 needs {hard + SPARE_FILES} open files .* allows {hard}"):
            allow_open_files(hard, "--flag 9")


def test_the_router_may_open_two_sockets_per_request(tmp_path):
    """A process inherits its parent's limit, and a shell's limit is usually 1024."""
    with lowest_soft_limit(room=1200) as hard:
        with pytest.raises(ValueError, match=f"--sglang-server-concurrency for {hard} requests .* allows {hard}"):
            Router((), "127.0.0.1", LogFile(tmp_path / "router.log"), requests=hard)
        router = Router((), "127.0.0.1", LogFile(tmp_path / "router.log"), requests=600)
        limit = psutil.Process(router.pid).rlimit(psutil.RLIMIT_NOFILE)
        libraries = Path(f"/proc/{router.pid}/maps").read_text()
        router.close()
        assert limit == (SPARE_FILES + 1200, hard)
        assert "sglang_router" in libraries and "libtorch" not in libraries, "it imports SGLang, which takes 6 s"


@pytest.mark.parametrize("which", ["its own", "that of its metrics"])
def test_the_router_starts_on_other_ports_if_another_process_takes_one(tmp_path, monkeypatch, which):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        ports = iter([taken, free_port("127.0.0.1")] if which == "its own" else [free_port("127.0.0.1"), taken])
        monkeypatch.setattr(router_module, "free_port", lambda host: next(ports, None) or free_port(host))
        router = Router((), "127.0.0.1", LogFile(tmp_path / "router.log"), requests=10)
        try:
            assert not router.url.endswith(f":{taken}")
            assert httpx.get(f"{router.url}/liveness", trust_env=False).status_code == 200
        finally:
            router.close()
