"""Serve a torch TCP store, by which the ranks of a process group find each other, at one address only."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore as TCPStore  # torch.distributed has it too, untyped


def serve_store(host: str, timeout: timedelta) -> TCPStore:
    """Serve a store on a free port of ``host``.

    A store that opens its own socket listens on all interfaces, whatever ``host`` is, and takes reads and writes from
    everybody who can connect. This one is handed a socket that is bound to ``host``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=2048) as listener:
        port: int = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.fileno(),
        )
        listener.detach()  # the store closes it
    return store
