"""Who may connect to the real SGLang server: its sockets, and which of its calls needs which key."""

import glob
import os
import stat
import tempfile

import httpx
import psutil
import pytest

from miles.engine.servers.keys import bearer
from tests.fast.engine.sglang_servers import KEYS, server_of

# The first test of the suite that needs the server starts it.
pytestmark = pytest.mark.timeout(900)

# Calls that need the admin key. They include every call that miles controls a server with.
CONTROL = [
    "abort_request",
    "continue_generation",
    "destroy_weights_update_group",
    "get_weights_by_name",
    "init_weights_update_group",
    "load_lora_adapter",
    "load_lora_adapter_from_tensors",
    "pause_generation",
    "release_memory_occupation",
    "resume_memory_occupation",
    "send_weights_to_remote_instance",
    "set_internal_state",
    "slow_down",
    "update_weight_version",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
    "weights_checker",
]
GENERATION = ["generate", "encode", "v1/completions", "v1/chat/completions", "open_session"]
STATE = ["model_info", "server_info", "v1/loads", "v1/models"]
OPEN = ["ready", "health"]  # SGLang never asks for a key here


@pytest.fixture(scope="module")
def http(sglang_address):
    with httpx.Client(base_url=f"http://{sglang_address}", timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def processes(sglang_address):
    """Return the processes of the server, which this process has started."""
    port = int(sglang_address.rpartition(":")[2])
    for child in psutil.Process().children():
        family = [child, *child.children(recursive=True)]
        if any(c.laddr.port == port for p in family for c in p.net_connections() if c.status == psutil.CONN_LISTEN):
            return family
    raise AssertionError("no child listens at that port")


@pytest.mark.parametrize("path", CONTROL)
def test_control_calls_need_the_admin_key(http, path):
    for headers in ({}, bearer(KEYS.server), bearer("x")):
        assert http.post(f"/{path}", json={}, headers=headers).status_code == 401


def test_the_admin_key_admits_and_weights_can_be_updated_with_it(http):
    answer = http.post("/update_weights_from_disk", json={"model_path": "nonesuch"}, headers=bearer(KEYS.admin))
    assert answer.status_code == 400 and answer.json()["success"] is False  # admitted, and there is no such model


@pytest.mark.parametrize("path", GENERATION)
def test_generation_needs_the_servers_key(http, path):
    assert http.post(f"/{path}", json={}).status_code == 401
    assert http.post(f"/{path}", json={}, headers=bearer(KEYS.admin)).status_code == 401
    assert http.post(f"/{path}", json={}, headers=bearer(KEYS.server)).status_code != 401


@pytest.mark.parametrize("path", STATE)
def test_a_servers_state_needs_its_key(http, path):
    assert http.get(f"/{path}").status_code == 401
    assert http.get(f"/{path}", headers=bearer(KEYS.server)).status_code == 200


@pytest.mark.parametrize("path", OPEN)
def test_anybody_on_the_machine_may_ask_whether_it_lives(http, path):
    answer = http.get(f"/{path}")
    assert answer.status_code == 200 and not any(key in answer.text for key in vars(KEYS).values())


def test_it_listens_on_the_loopback_interface_only(processes, sglang_address):
    """The server at its HTTP address; the scheduler for gloo's groups, but not for a rendezvous."""
    addresses = [c.laddr for process in processes for c in process.net_connections("inet") if not c.raddr]
    assert {address.ip for address in addresses} == {"127.0.0.1"}
    own = [c.laddr for c in processes[0].net_connections("inet") if not c.raddr]
    assert [f"{address.ip}:{address.port}" for address in own] == [sglang_address]


@pytest.mark.slow
def test_with_the_address_of_a_node_it_listens_there_and_not_on_all_interfaces(tiny_model, tmp_path):
    server = server_of(tiny_model, tmp_path / "server.log", host="127.0.0.2")
    try:
        url = server.start()
        leader = psutil.Process(server.pid)
        family = [leader, *leader.children(recursive=True)]
        addresses = {c.laddr for process in family for c in process.net_connections("inet") if c.status == "LISTEN"}
    finally:
        server.stop()
    assert url.startswith("http://127.0.0.2:")
    assert {address.ip for address in addresses} <= {"127.0.0.1", "127.0.0.2"}
    assert [address.ip for address in addresses if url.endswith(f":{address.port}")] == ["127.0.0.2"]


def test_its_other_sockets_belong_to_its_user(processes):
    """The schedulers' ZeroMQ sockets and the file through which the ranks connect."""
    own = {c.laddr for process in processes for c in process.net_connections("unix") if c.laddr.startswith("/")}
    for path in own | set(glob.glob(f"{tempfile.gettempdir()}/miles-engine-*")):
        if os.path.exists(path):
            assert stat.S_IMODE(os.stat(path).st_mode) & 0o022 == 0, path


def test_nobody_sees_its_keys(processes):
    words = " ".join(word for process in processes for word in process.cmdline())
    environment = str([process.environ() for process in processes])
    assert not any(key in words + environment for key in vars(KEYS).values())
