"""The keys of an engine's servers and of their router, without which neither answers.

A server has two: one for generation and one for control calls, weight updates above all. Every run makes its own,
unless the user gives them. They reach the processes through a pipe (processes.py), so that no process list shows them.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from miles.config.servers.passed_on import ADMIN_KEY, SERVER_KEY, ServerFlags, value_of


@dataclass(frozen=True)
class Keys:
    """Hold the keys of a run; None for a key that it does not use.

    Attributes:
        server: For generation and for reading a server's state.
        admin: For control calls.
        router: For generation through the router, and for its list of servers.
    """

    server: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)
    router: str | None = field(default=None, repr=False)

    @property
    def server_words(self) -> list[str]:
        """The flags that give a server its keys."""
        pairs = ((SERVER_KEY, self.server), (ADMIN_KEY, self.admin))
        return [word for flag, key in pairs if key is not None for word in (flag, key)]

    @property
    def router_words(self) -> list[str]:
        """The flags that give the router its key."""
        return [] if self.router is None else [SERVER_KEY, self.router]


NO_KEYS = Keys()


def keys_of(flags: ServerFlags, external: bool) -> Keys:
    """Return the keys that the user gives, and new ones for the others.

    Args:
        flags: The flags of servers and router.
        external: Whether the servers are started by somebody else. They have no keys but those that are given.
    """
    server, admin = value_of(flags.server, SERVER_KEY), value_of(flags.server, ADMIN_KEY)
    router = value_of(flags.router, SERVER_KEY) or _new()
    if external:
        return Keys(server, admin or server, router)  # a server with one key wants it for everything
    return Keys(server or _new(), admin or _new(), router)


def bearer(key: str | None) -> dict[str, str]:
    """Return the HTTP header that carries ``key``."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _new() -> str:
    return secrets.token_hex(32)  # in base 64, one in 64 begins with "-", and SGLang's parser takes it for a flag
