"""A real SGLang server leaves no file behind: no shared-memory segment, no temporary socket."""

from pathlib import Path

import pytest

from miles.base.processes import RUN_FOLDER
from miles.engine.servers.leftovers import NOTED, SEGMENTS
from tests.fast.engine.sglang_servers import server_of

pytest.importorskip("sglang")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_stopped_server_leaves_no_segment_and_no_temporary_file(tiny_model, tmp_path, monkeypatch, devices):
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv(RUN_FOLDER, str(folder))
    server = server_of(tiny_model, tmp_path / "server.log", devices=devices)
    server.start()
    try:
        (noted,) = folder.rglob(NOTED)
        segments = noted.read_text().split()  # a server that is ready has removed some of them
        left = [name for name in segments if Path(name).exists()]
        kinds = {prefix for prefix in SEGMENTS[:2] if any(name.startswith(prefix) for name in left)}
        assert kinds == set(SEGMENTS[:devices]), "ranks of tensor parallelism have a queue"
        assert any(path.is_socket() for path in folder.rglob("*")), "its sockets are elsewhere"
    finally:
        server.stop()
    assert not any(Path(name).exists() for name in segments)
    assert [
        path.name for path in folder.iterdir() if path.name != "stacks"
    ] == []  # miles.base.processes keeps it for the run
