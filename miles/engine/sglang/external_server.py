"""A server that somebody else has started, and stops."""

from __future__ import annotations

import asyncio

import httpx

from miles.engine.sglang.child_process import ServerFailed

WAIT_SECONDS = 1800
HEALTH_SECONDS = 60.0
POLL_SECONDS = 1.0


class ExternalServer:
    """One address of ``--rollout-external-engine-addrs``; ``miles.engine.sglang.engine_pool.Server``.

    After a failure it is awaited rather than restarted: it comes back in when it answers again.
    """

    def __init__(self, address: str) -> None:
        """``address`` is HOST:PORT, with or without http:// before it."""
        self._url = "http://" + address.removeprefix("http://").rstrip("/")
        self.name = f"the engine at {self._url}"

    async def start(self) -> str:
        """Wait until it generates; returns its URL. Raises ``ServerFailed`` after ``WAIT_SECONDS``.

        A run that was killed may have left it paused, so it is told to go on. Its own test is asked, not /ready: that
        stays negative, once the test has failed, until the test is asked again.
        """
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not await self._generates():
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise ServerFailed(
                f"--rollout-external-engine-addrs: no SGLang server generated at {self._url} within "
                f"{WAIT_SECONDS} s; start it, or correct the address"
            ) from None
        return self._url

    async def _generates(self) -> bool:
        async with httpx.AsyncClient(base_url=self._url, timeout=HEALTH_SECONDS, trust_env=False) as http:
            try:
                await http.post("/continue_generation", json={})
                return (await http.get("/health_generate")).status_code == 200
            except httpx.TransportError:
                return False

    async def stop(self) -> None:
        """It is not ours to stop."""
