"""Let nobody call a vLLM server without its keys.

vLLM checks a key for generation only; calls that pause it, load weights or run any of its methods are for everybody
who can connect. This is a middleware of the server (``--middleware``). It imports the standard library only, because it
runs in vLLM's environment, and knows no model: the keys are in the environment of the server.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

KEY, ADMIN_KEY = "MILES_SERVER_KEY", "MILES_SERVER_ADMIN_KEY"  # environment variables
OPEN = ("/health",)
NORMAL = ("/inference/v1/generate",)  # wants the key for generation; everything else wants the key for control calls

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
App = Callable[[Mapping[str, Any], Receive, Send], Awaitable[None]]


class Guard:
    """Answer 401 to a request without the key that its path wants."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._normal, self._admin = (f"Bearer {os.environ[name]}".encode() for name in (KEY, ADMIN_KEY))

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _may_pass(self, scope: Mapping[str, Any]) -> bool:
        if scope["path"] in OPEN:
            return True
        wanted = self._normal if scope["path"] in NORMAL else self._admin
        header = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(header, wanted)
