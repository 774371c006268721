"""JSON requests to the server of a reward: bounded in number, time and size, repeated while the server is busy.

Only the host of the given URL is contacted: redirects and the proxies of the environment are not followed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from miles.base import strict_json
from miles.base.flags import Errors
from miles.base.secrets import hide_in_text, public, secrets_in
from miles.base.text import name_and_words, one_line

if TYPE_CHECKING:
    import httpx

_BUSY = (408, 425, 429, 500, 502, 503, 504)
LARGEST_REPLY = 8 << 20  # bytes; values read from them may take 20 times as much memory
_LARGEST_FAULT = 1 << 12  # bytes that are read of a reply that is no success
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0  # seconds between two attempts

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request, with the URL


class HttpCallError(Exception):
    """No answer to a request, after all attempts; the message states why, without secrets."""


class JsonClient:
    """Posts JSON to one URL.

    Args:
        url: The URL.
        name: The flag of the URL, as a field: for messages.
        key: Sent as ``Authorization: Bearer``; None sends none.
        concurrency: The requests in flight at once; further ones wait.
        retries: Further attempts if the server is busy (429, 5xx), does not answer, or cannot be reached.
        seconds: The longest time of an attempt.
        first_wait: Seconds before the second attempt, doubled for each one after it.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        key: str | None = None,
        concurrency: int,
        retries: int,
        seconds: float,
        first_wait: float = _FIRST_WAIT,
    ) -> None:
        self._url = url
        self._public_name = public(name, url)
        self._secrets = secrets_in(name, url) | (set() if key is None else {key})
        # Compressed, a short reply may be a very long one.
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._concurrency = concurrency
        self._retries = retries
        self._seconds = seconds
        self._first_wait = first_wait
        self._client: httpx.AsyncClient | None = None
        self._slots: asyncio.Semaphore | None = None

    async def post(self, payload: Mapping[str, Any] | list[Any]) -> Any:
        """Return the JSON that the server answers with.

        Raises:
            HttpCallError: There is none after all attempts, or the server refuses the request.
        """
        import httpx

        if self._client is None or self._slots is None:  # made here: they belong to the event loop that calls
            limits = httpx.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency)
            self._client = httpx.AsyncClient(
                headers=self._headers, timeout=self._seconds, limits=limits, follow_redirects=False, trust_env=False
            )
            self._slots = asyncio.Semaphore(self._concurrency)
        body = json.dumps(payload).encode("ascii")  # half of a surrogate pair stays an escape
        async with self._slots:
            return await self._attempts(self._client, body)

    async def _attempts(self, client: httpx.AsyncClient, body: bytes) -> Any:
        import httpx

        wait = self._first_wait
        for left in range(self._retries, -1, -1):
            asked: float | None = None
            try:
                async with asyncio.timeout(self._seconds), client.stream("POST", self._url, content=body) as response:
                    text = await self._text(response)
                if response.status_code == 200:
                    return self._decoded(text)
                fault = f"answered with status {response.status_code}: {one_line(text, 120)!r}"
                if response.status_code not in _BUSY:
                    raise self._error(fault)
                asked = _seconds_asked(response.headers.get("Retry-After"))
            except (httpx.HTTPError, TimeoutError) as error:
                fault = f"gave no answer ({name_and_words(error)})"
            if not left:
                raise self._error(f"{fault} (attempt {self._retries + 1} of {self._retries + 1})")
            pause = wait * (0.5 + random.random()) if asked is None else asked
            await asyncio.sleep(min(pause, _LONGEST_WAIT))
            wait *= 2
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _text(self, response: httpx.Response) -> str:
        """Read a reply, or the start of one that is no success.

        Raises:
            HttpCallError: It is a success, and compressed or longer than ``LARGEST_REPLY``.
        """
        is_success = response.status_code == 200
        encoding = response.headers.get("Content-Encoding", "identity")
        if is_success and encoding.lower() != "identity":
            raise self.failure(f"the Content-Encoding {one_line(encoding, 40)}; answer without one, as was asked for")
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if not is_success and len(body) > _LARGEST_FAULT:
                break
            if len(body) > LARGEST_REPLY:
                raise self.failure(f"more than {LARGEST_REPLY >> 20} MiB; answer with the rewards alone")
        return body.decode("utf-8", "replace")

    def _decoded(self, text: str) -> Any:
        try:
            return strict_json.loads(text)
        except strict_json.StrictJsonError as error:
            raise self.failure(f"{error}: {one_line(text, 120)!r}") from None

    def failure(self, fault: str) -> HttpCallError:
        """Return the error for an answer that is of no use, without secrets."""
        return self._error(f"answered with {fault}")

    def _error(self, fault: str) -> HttpCallError:
        return HttpCallError(hide_in_text(f"{self._public_name} {fault}", self._secrets))


def _seconds_asked(header: str | None) -> float | None:
    """Return the seconds of a ``Retry-After``; None for none, or a date."""
    return float(header) if header is not None and header.isdecimal() and len(header) < 6 else None


def check_url(field: str, url: str | None, meaning: str, errors: Errors) -> None:
    """Check that a URL is given, and names a host by http or https."""
    errors.require(field, url, meaning)
    if url is None:
        return
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid:
        errors.refuse(field, url, "is no http URL with a host", "write it as http://host:port/path")
