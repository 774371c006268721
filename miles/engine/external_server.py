"""A server that somebody else has started, and stops."""

from __future__ import annotations

import asyncio

from miles.engine.child_process import ServerFailed
from miles.engine.sglang_server import answers

WAIT_SECONDS = 1800
POLL_SECONDS = 1.0


class ExternalServer:
    """One address of ``--rollout-external-engine-addrs``; ``miles.engine.engine_pool.Server``.

    After a failure it is awaited rather than restarted: it comes back in when it answers again.
    """

    def __init__(self, address: str) -> None:
        """``address`` is HOST:PORT, with or without http:// before it."""
        self._url = "http://" + address.removeprefix("http://").rstrip("/")
        self.name = f"the engine at {self._url}"

    async def start(self) -> str:
        """Wait until it answers; returns its URL. Raises ``ServerFailed`` after ``WAIT_SECONDS``."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not await asyncio.to_thread(answers, self._url):
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise ServerFailed(
                f"--rollout-external-engine-addrs: no SGLang server answered at {self._url}/ready within "
                f"{WAIT_SECONDS} s; start it, or correct the address"
            ) from None
        return self._url

    async def stop(self) -> None:
        """It is not ours to stop."""
