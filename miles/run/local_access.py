"""Keep a Ray that a run starts on this machine to this machine and this user: its sockets, its token, its files."""

import os
import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from ray._common.utils import get_default_system_temp_dir
from ray._private import ray_constants

from miles.base.attributes import set_within

LOOPBACK = "127.0.0.1"
# The collectives listen too, gloo at the address of the host's name, NCCL at the address of the first network
# interface.
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_TOKEN_BYTES = 32
_TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def loopback_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make workers' collectives listen on the loopback interface only.

    Variables that ``environment`` already sets are left out.
    """
    return {name: "lo" for name in _INTERFACES if name not in environment}


def loopback_only() -> AbstractContextManager[object]:
    """Have a local Ray that the block starts listen on the loopback interface, and not on all of them.

    Ray replaces ``_node_ip_address="127.0.0.1"`` by the host's own address. With this switch it keeps
    127.0.0.1, as it does on systems on which it supports one machine only (macOS and Windows).
    """
    return set_within(ray_constants, ENABLE_RAY_CLUSTER=False)


def make_token_private() -> None:
    """Make Ray's file with the authentication token readable for this user only; create it if there is none.

    Ray would create it readable for everybody, and whoever has the token can run code as this user. A token that is
    given in the environment is the user's own affair.
    """
    if any(os.environ.get(name) for name in _TOKEN_VARIABLES) or os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
        return
    with os.fdopen(file, "w") as token:
        token.write(secrets.token_hex(_TOKEN_BYTES))


def private_session_root() -> Path:
    """Return a folder for the files of runs, Ray's sessions too, that only this user can enter; create it if needed.

    Ray opens the folder of a session for everybody, and again with each worker, so the folder above it must be closed.
    The log files in it hold the environment variables of workers, and its sockets belong to the raylet.

    Raises:
        ValueError: If another user has taken the name.
    """
    parent = Path(get_default_system_temp_dir()) / f"ray-{os.getuid()}"
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if parent.is_symlink() or parent.stat().st_uid != os.getuid():
        raise ValueError(
            f"{parent}: belongs to another user, who could read what Ray writes there; remove it, or set RAY_TMPDIR to "
            "a folder of your own"
        )
    parent.chmod(0o700)
    return parent
