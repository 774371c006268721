"""The command line and the environment of a server."""

import os
import socket
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from small_disk import fill, mounted_disk

from miles.base.disk_faults import WriteFailed
from miles.base.processes import RUN_FOLDER
from miles.config.sglang.installed import server_flags
from miles.engine.base import ServerFailed
from miles.engine.servers.keys import Keys
from miles.engine.servers.launch import ServerOnHost
from miles.engine.servers.processes import LogFile, free_port
from miles.engine.sglang import launch
from miles.engine.sglang.launch import SglangProgram, cpu_support

STORE = Path("some") / "store"
CPU = SglangProgram("some/model", "float32", "cpu", 2, seed=7)


def pairs(words):
    """Return flag to value, None for a switch; fails if a flag is given twice."""
    by_flag = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            assert word not in by_flag, f"{word} is given twice"
            by_flag[word] = None if following.startswith("--") else following
    return by_flag


def test_cpu_server_gets_the_flags_it_needs():
    flags = pairs(CPU.arguments("127.0.0.1", 3000))
    assert flags["--port"] == "3000" and flags["--tp-size"] == "2" and flags["--random-seed"] == "7"
    assert flags["--device"] == "cpu" and flags["--attention-backend"] == "torch_native"


def test_cuda_server_keeps_its_own_defaults():
    flags = pairs(SglangProgram("some/model", "bfloat16", "cuda", 1, seed=0).arguments("h", 1))
    assert not {"--device", "--attention-backend", "--mem-fraction-static"} & flags.keys()


def test_colocated_server_can_release_its_memory():
    plain, sharing = (
        SglangProgram("m", "bfloat16", "cuda", 1, seed=0, releases_memory=shares) for shares in (False, True)
    )
    assert set(sharing.arguments("h", 1)) - set(plain.arguments("h", 1)) == {"--enable-memory-saver"}


@pytest.mark.parametrize(
    "flags", [("--dtype", "bfloat16"), ("--dtype=bfloat16",), ("--tp", "2"), ("--disable-overlap-schedule",)]
)
def test_a_flag_of_the_user_replaces_the_default(flags):
    words = SglangProgram("m", "float32", "cpu", 2, seed=0, flags=flags).arguments("h", 1)
    assert words[-len(flags) :] == [*flags]
    name = flags[0].split("=")[0]
    assert sum(word.split("=")[0] == name for word in words) == 1


def test_only_cpu_servers_see_the_support_files():
    variables = {"PYTHONPATH": "mine", "OMP_NUM_THREADS": "3"}
    environment = CPU.environment(variables, STORE.parent)
    text = cpu_support() / "without_images"
    assert environment["PYTHONPATH"].split(":") == [str(cpu_support()), str(text), "mine"]
    assert (text / "torchvision" / "__init__.py").is_file()
    images = replace(CPU, reads_images=True)
    assert images.environment(variables, STORE.parent)["PYTHONPATH"].split(":") == [str(cpu_support()), "mine"]
    assert pairs(images.arguments("h", 1))["--mm-attention-backend"] == "sdpa"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert (cpu_support() / f"{CPU.module}.py").is_file()
    cuda = SglangProgram("m", "bfloat16", "cuda", 1, seed=0)
    assert cuda.module == "sglang.launch_server"
    assert cuda.environment(variables, STORE.parent)["PYTHONPATH"] == "mine"
    assert (cpu_support() / "sgl_kernel" / "__init__.py").is_file()


def test_a_server_can_compute_its_logits_in_fp32():
    plain, exact = (SglangProgram("m", "bfloat16", "cuda", 1, seed=0, fp32_head=asked) for asked in (False, True))
    assert set(exact.arguments("h", 1)) - set(plain.arguments("h", 1)) == {"--enable-fp32-lm-head"}
    assert "--enable-fp32-lm-head" in server_flags() or not server_flags()


@pytest.fixture
def ending_server(tmp_path, monkeypatch):
    """Return a server whose process ends at once, on a host whose temporary files are on a full disk, and the disk."""
    monkeypatch.setattr(launch, "find_spec", lambda name: name)
    monkeypatch.setattr(launch, "MODULE_ON_CPU", "a_module_that_is_not_there")
    with mounted_disk(tmp_path / "disk") as disk:
        monkeypatch.setenv(RUN_FOLDER, str(disk))
        fill(disk)
        yield ServerOnHost(CPU, LogFile(tmp_path / "engine.log"), "127.0.0.1"), disk


def test_a_server_without_room_for_its_temporary_files_names_disk_and_host(ending_server):
    server, disk = ending_server
    words = f"of the server on host {socket.gethostname()} was not written, because the disk tmpfs at {disk} .* is full"
    with pytest.raises(WriteFailed, match=words):
        server.start()
    assert server.pid is None


def test_a_server_that_ends_on_a_full_disk_names_disk_and_host(ending_server, monkeypatch):
    server, disk = ending_server
    filler = disk / "filler"
    os.truncate(filler, filler.stat().st_size - 4096)  # a last bit of room, for its notes
    words = f"^the disk tmpfs at {disk} .* is full on host {socket.gethostname()}; the server ended with status 1"
    with pytest.raises(ServerFailed, match=words):
        server.start()
    monkeypatch.setenv(RUN_FOLDER, str(disk.parent))  # with room
    with pytest.raises(ServerFailed, match="^the server ended with status 1") as caught:
        server.start()
    assert caught.value.__cause__ is None


# A server that finds its port taken and ends, after a long traceback, or that serves.
SERVER = """
import socket, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

port = int(sys.argv[sys.argv.index("--port") + 1])
says = {says}
try:
    if says and port == {taken}:
        raise OSError("[Errno 98] Address already in use")
    server = HTTPServer(("127.0.0.1", port), Handler)
except OSError as error:
    print(error if says else "the server cannot bind")
    print("a line of a traceback\\n" * 100)
    sys.exit(3)
server.serve_forever()
"""


class OfAnotherRun(BaseHTTPRequestHandler):
    """A server that is ready, and wants another key."""

    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 401)
        self.end_headers()


@pytest.mark.parametrize("says", [True, False], ids=["as its log says", "by a server of another run"])
def test_a_server_whose_port_is_taken_meanwhile_starts_on_another(tmp_path, monkeypatch, says):
    with ThreadingHTTPServer(("127.0.0.1", 0), OfAnotherRun) as other:
        taken = other.server_port
        if says:
            other.server_close()  # it has had the port for a moment only
        else:
            threading.Thread(target=other.serve_forever, daemon=True).start()
        (tmp_path / "taken_port.py").write_text(SERVER.format(says=says, taken=taken))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setattr(launch, "find_spec", lambda name: name)
        monkeypatch.setattr(launch, "MODULE_ON_CPU", "taken_port")
        ports = iter([taken, free_port("127.0.0.1")])
        monkeypatch.setattr("miles.engine.servers.launch.free_port", lambda host: next(ports))
        server = ServerOnHost(replace(CPU, keys=Keys("a key")), LogFile(tmp_path / "engine.log"), "127.0.0.1")
        try:
            assert not server.start().endswith(f":{taken}")
        finally:
            server.stop()
            if not says:
                other.shutdown()
