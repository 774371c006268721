"""A socket a request: how many files this process may have open."""

from __future__ import annotations

import resource

SPARE = 1024  # for everything else that is open, and sockets that are closing


def allow_open_files(sockets: int, why: str) -> None:
    """Raise the soft limit to what ``sockets`` connections need. Raises ``ValueError`` where the hard limit is lower.

    ``why`` begins the message: the flag that asks for so many, and its value.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = sockets + SPARE
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ValueError(
            f"{why} needs {wanted} open files at a time, and the system allows {hard}; give less, or raise the hard "
            f"limit (ulimit -Hn {wanted})"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
