"""A server's shared memory is removed whatever happens to the process that started the server. Starts no SGLang."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from miles.base.processes import RUN_FOLDER
from miles.engine.servers.leftovers import NOTED, SEGMENTS, open_segments
from miles.run.run_guard import clean_up

# A server whose child, as SGLang's scheduler, opens a segment. It is ready if IS_READY is set.
SERVER = """
import os, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer

held = f"file = open({os.environ['SEGMENT']!r}, 'w'); input()"
scheduler = subprocess.Popen([sys.executable, "-c", held], stdin=subprocess.PIPE)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if "IS_READY" in os.environ else 503)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""

# Ends on SIGTERM as a Ray actor does: the interpreter exits.
OWNER = """
import signal, sys
from pathlib import Path
from miles.engine.servers.launch import ServerOnHost
from miles.engine.sglang import launch
from miles.engine.servers.processes import LogFile

signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
launch.find_spec = lambda name: name
launch.MODULE_ON_CPU = "holding_server"
server = ServerOnHost(launch.SglangProgram("m", "float32", "cpu", 1, seed=0), LogFile(Path("log")), "127.0.0.1")
server.start()
print("serves", flush=True)
signal.pause()
"""


@pytest.fixture
def segment():
    path = Path(f"{SEGMENTS[0]}{uuid.uuid4().hex[:12]}_test.shm")
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "holding_server.py").write_text(SERVER)
    yield folder
    clean_up(folder)


def start_owner(run_folder, segment, **environment):
    path = os.pathsep.join([str(run_folder.parent), os.environ.get("PYTHONPATH", "")])
    environment |= {"PYTHONPATH": path, RUN_FOLDER: str(run_folder), "SEGMENT": str(segment)}
    return subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=run_folder.parent,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_until(holds, seconds=60):
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.01)


def notes(run_folder):
    return "".join(path.read_text() for path in run_folder.rglob(NOTED))


def test_an_owner_that_is_terminated_removes_the_segments_and_files_of_its_server(run_folder, segment):
    with start_owner(run_folder, segment, IS_READY="1") as owner:
        assert owner.stdout.readline() == "serves\n"
        wait_until(lambda: str(segment) in notes(run_folder))
        assert segment.exists()
        owner.terminate()
    assert not segment.exists() and not list(run_folder.glob("e*"))


def test_a_server_notes_its_segments_while_its_owner_is_stopped(run_folder, segment):
    with start_owner(run_folder, segment) as owner:
        wait_until(lambda: len(psutil.Process(owner.pid).children(recursive=True)) > 1)  # the server has its keys
        owner.send_signal(signal.SIGSTOP)
        wait_until(lambda: str(segment) in notes(run_folder))
        owner.kill()
    clean_up(run_folder)
    assert not segment.exists() and not run_folder.exists()


def test_a_segment_that_is_not_noted_yet_is_removed_with_the_processes(run_folder, segment):
    held = f"file = open({str(segment)!r}, 'w'); print(flush=True); input()"
    environment = os.environ | {RUN_FOLDER: str(run_folder)}
    command = [sys.executable, "-c", held]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as scheduler:
        scheduler.stdout.readline()
        clean_up(run_folder)
    assert not segment.exists()


def test_a_semaphore_is_found_in_the_process_that_made_it():
    lock = multiprocessing.get_context("spawn").Lock()
    name = f"/dev/shm/sem.{lock._semlock.name.removeprefix('/')}"
    assert Path(name).exists() and name in open_segments([psutil.Process()])
