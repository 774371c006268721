"""Half-open connections cost no server of a run its answers, and never take the run's last descriptors."""

import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from run_folder import write_run

MANY = 400  # half-open connections, to processes that may have 200 descriptors
# A process with one of the servers; for each line that it reads, it opens files as a run does.
PROGRAM = """
import asyncio, resource, sys, threading
from pathlib import Path
from miles.base import connections
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
connections.SECONDS_TO_ASK = float(sys.argv[3])
def report():
    from miles.observe.report.server import ReportServer
    return ReportServer(Path(sys.argv[2]), 0).url
def prometheus():
    from miles.observe.sinks import PrometheusSink
    sink = PrometheusSink(0)
    return sink.url
def agents():
    from miles.rollout.agents.server import SessionServer
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(SessionServer.start(), loop).result().url + "/models"
print("url", {"report": report, "prometheus": prometheus, "agents": agents}[sys.argv[1]](), flush=True)
for line in sys.stdin:
    try:
        files = [open(__import__("os").devnull) for _ in range(40)]
        print("opened", len(files), flush=True)
        [file.close() for file in files]
    except OSError as error:
        print(error, flush=True)
"""


@pytest.fixture
def connections() -> Iterator[ExitStack]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * MANY)), hard))
    with ExitStack() as stack:
        yield stack
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("kind", ["report", "prometheus", "agents"])
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "], ids=["silent", "half a request"])
def test_half_open_connections(tmp_path, connections, kind, sent):
    write_run(tmp_path, steps=2)
    command = [sys.executable, "-c", PROGRAM, kind, str(tmp_path), "2"]
    process = connections.enter_context(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    )
    connections.callback(process.kill)
    lines = iter(process.stdout.readline, "")
    url = next(line for line in lines if line.startswith("url")).split()[1]
    place = ("127.0.0.1", int(url.split(":")[2].split("/")[0]))

    def opens() -> str:
        process.stdin.write("\n")
        process.stdin.flush()
        return next(lines)

    half_open = []
    for _ in range(MANY):
        half_open.append(connections.enter_context(socket.create_connection(place)))
        half_open[-1].sendall(sent)
        if len(half_open) % 100 == 0:
            assert opens() == "opened 40\n"
    if kind != "agents":  # there, all that has no key waits until the silent ones are ended
        assert urllib.request.urlopen(url, timeout=5).status == 200
    # One that sends a byte now and then is ended, too.
    slow = connections.enter_context(socket.create_connection(place))
    ended = threading.Event()
    began = time.monotonic()
    try:
        while time.monotonic() < began + 60:
            slow.sendall(b"G")
            if ended.wait(0.2):
                break
    except OSError:
        ended.set()
    assert ended.is_set() and opens() == "opened 40\n"
    for one in half_open:
        one.settimeout(60)
        with suppress(ConnectionError):
            assert one.recv(1) == b""
    if kind != "agents":
        assert urllib.request.urlopen(url, timeout=5).status == 200
    else:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url, timeout=5)
    process.stdin.close()
    assert process.wait(30) == 0 and process.stderr.read() == ""
