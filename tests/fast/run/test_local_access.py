"""A Ray on one machine belongs to its user: its token, and secrets that Ray would write to its logs."""

import json
import os
import socket
import stat

import pytest

from miles.config.cluster import ClusterArguments
from miles.config.settings import Settings
from miles.run import local_access
from miles.run.train_actor import TrainActor, _environment


@pytest.fixture
def token(tmp_path, monkeypatch):
    """Return the path of Ray's token in a separate home folder, under a umask that forbids nothing."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    before = os.umask(0)
    yield tmp_path / ".ray" / "auth_token"
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_token_is_readable_for_its_user_only(token):
    local_access.make_token_private()
    assert len(token.read_text()) == 64
    assert (mode(token), mode(token.parent)) == (0o600, 0o700)


def test_a_token_that_others_can_read_is_kept_and_closed(token):
    token.parent.mkdir()
    token.write_text("the token of another cluster of mine")
    assert mode(token) == 0o666
    local_access.make_token_private()
    assert mode(token) == 0o600
    assert token.read_text() == "the token of another cluster of mine"


@pytest.mark.parametrize("variable", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_from_elsewhere_needs_no_file(token, monkeypatch, variable):
    monkeypatch.setenv(variable, "x")
    local_access.make_token_private()
    assert not token.exists()


def test_sessions_are_in_a_folder_that_only_their_user_can_enter(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    before = os.umask(0)
    root = local_access.private_session_root()
    os.umask(before)
    assert mode(root) == 0o700
    root.chmod(0o755)
    assert local_access.private_session_root() == root and mode(root) == 0o700
    root.rmdir()
    root.symlink_to(tmp_path)
    with pytest.raises(ValueError, match="belongs to another user.*RAY_TMPDIR"):
        local_access.private_session_root()


def test_secret_variables_reach_the_trainer_past_ray(monkeypatch):
    section = ClusterArguments(train_env_vars=json.dumps({"HF_TOKEN": "open-sesame", "NCCL_DEBUG": "INFO"}))
    assert _environment(section) == ({"NCCL_DEBUG": "INFO"}, {"HF_TOKEN": "open-sesame"})
    monkeypatch.setenv("HF_TOKEN", "")
    TrainActor(0, Settings(cluster=section), "cpu")
    assert os.environ["HF_TOKEN"] == "open-sesame"


def test_the_interface_of_the_collectives_exists_and_is_not_forced_on_anybody():
    interfaces = local_access.loopback_environment({})
    assert set(interfaces.values()) <= {name for _, name in socket.if_nameindex()}
    variables = {"GLOO_SOCKET_IFNAME": "eth0"}
    assert local_access.loopback_environment(variables) == {"NCCL_SOCKET_IFNAME": "lo"}
