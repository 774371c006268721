"""The HTTP server that agent programs call: OpenAI's chat completions, on the loopback interface, a key per session."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import time
from asyncio import Transport
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from miles.base.connections import SECONDS_TO_ASK, leaves_descriptors
from miles.rollout.agents.chat import ApiError, ChatRequest, read_request
from miles.rollout.agents.session import Answer, Session

MODEL = "policy"  # the one model; a call may name any
HOST = "127.0.0.1"
MAX_BODY = 64 << 20  # bytes of a call
SECONDS_TO_SEND = 60.0  # for the body of a call

_logger = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SessionServer:
    """Answers ``POST /v1/chat/completions`` and ``GET /v1/models`` of the open sessions. ``start`` makes one.

    Attributes:
        url: The base URL of the API for programs.
    """

    def __init__(self) -> None:
        self.url = ""
        self._sessions: dict[str, Session] = {}  # by key
        self._by_id: dict[str, Session] = {}  # by the name that a library gives a session in the header X-Session-ID
        self._listening = socket.create_server((HOST, 0), backlog=1024)
        self._accepting: asyncio.Task[None] | None = None
        self._silent: set[Any] = set()  # connections that have not asked for anything
        self._replaced: set[str] = set()  # parameters of sampling that a warning has named
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        # A call whose client has gone is cancelled, so that it is not recorded.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)

    @classmethod
    async def start(cls) -> SessionServer:
        """Listen at a free port of the loopback interface."""
        server = cls()
        await server._runner.setup()
        server._listening.setblocking(False)
        server._accepting = asyncio.create_task(server._accept())
        server.url = f"http://{HOST}:{server._listening.getsockname()[1]}/v1"
        return server

    async def _accept(self) -> None:
        """Take connections as long as descriptors remain for the run. Each has some seconds for its first request."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except OSError:  # others have taken all descriptors: asyncio's own servers wait as long
                await asyncio.sleep(1.0)
                continue
            if leaves_descriptors(connection) and self._runner.server is not None:
                transport, _ = await loop.connect_accepted_socket(self._runner.server, connection)
                self._silent.add(transport)
                loop.call_later(SECONDS_TO_ASK, self._end_silent, transport)
            else:
                connection.close()

    def _end_silent(self, transport: Transport) -> None:
        if transport in self._silent:
            self._silent.remove(transport)
            transport.abort()

    @asynccontextmanager
    async def serving(self, session: Session) -> AsyncIterator[str]:
        """Answer the calls of ``session`` inside the block, which is given the key. Afterwards the key is wrong."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]
            for name in [name for name, known in self._by_id.items() if known is session]:
                del self._by_id[name]
            await session.close()

    def accept(self, session_id: str, session: Session) -> None:
        """Take calls with this header ``X-Session-ID`` as calls of ``session``, without its key, while it is served.

        The id must be one that nobody guesses.
        """
        self._by_id[session_id] = session

    async def close(self) -> None:
        """End the sessions, stop listening, and close all connections."""
        for session in list(self._sessions.values()):
            await session.close()
        if self._accepting is not None:
            self._accepting.cancel()
        self._listening.close()
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Refuse requests without a session's key, and give errors OpenAI's form."""
        self._silent.discard(request.transport)
        try:
            self._session_of(request)
            return await handler(request)
        except ApiError as error:
            return web.json_response(error.body(), status=error.status)
        except web.HTTPException as error:
            refusal = ApiError(f"{request.method} {request.path}: {error.reason}", status=error.status)
            return web.json_response(refusal.body(), status=error.status)

    def _session_of(self, request: web.Request) -> Session:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:  # libraries that have one key for all their sessions tell them apart by this header
            session = self._by_id.get(request.headers.get("X-Session-ID", ""))
        if session is None:
            raise ApiError(
                "the API key is missing, or belongs to no open session; use OPENAI_API_KEY of the environment",
                status=401,
                code="invalid_api_key",
            )
        return session

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "miles"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        try:
            async with asyncio.timeout(SECONDS_TO_SEND):
                text = await request.text()
        except TimeoutError as error:
            raise ApiError(f"the body did not arrive within {SECONDS_TO_SEND:g} s", status=408) from error
        except UnicodeDecodeError as error:
            raise ApiError("the body is not text") from error
        call = read_request(text)
        self._note_sampling(call)
        answer = await session.answer(call)
        if call.stream:
            return await self._stream(request, call, answer)
        choice = {"index": 0, "message": answer.message, "logprobs": None, "finish_reason": answer.finish_reason}
        return web.json_response(_object("chat.completion", answer, [choice]) | {"usage": _usage(answer)})

    async def _stream(self, request: web.Request, call: ChatRequest, answer: Answer) -> web.StreamResponse:
        """Send the answer as server-sent events: as a whole, since it is recorded as a whole."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        delta = answer.message
        for place, tool_call in enumerate(delta.get("tool_calls", ())):
            tool_call["index"] = place
        choices: list[list[dict[str, Any]]] = [
            [{"index": 0, "delta": delta, "finish_reason": None}],
            [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}],
        ]
        events = [_object("chat.completion.chunk", answer, choice) for choice in choices]
        if call.stream_usage:
            events.append(_object("chat.completion.chunk", answer, []) | {"usage": _usage(answer)})
        for event in (*map(json.dumps, events), "[DONE]"):
            await response.write(f"data: {event}\n\n".encode())
        await response.write_eof()
        return response

    def _note_sampling(self, call: ChatRequest) -> None:
        new = sorted(set(call.sampling) - self._replaced)
        if new:
            self._replaced.update(new)
            _logger.warning(
                "--agent-command: its calls set %s, without effect: the trainer assumes the sampling of this "
                "run (--rollout-temperature, --rollout-top-p, --rollout-top-k, --rollout-seed)",
                ", ".join(new),
            )


def _object(kind: str, answer: Answer, choices: list[dict[str, Any]]) -> dict[str, Any]:
    created = int(time.time())
    return {"id": f"chatcmpl-{answer.number}", "object": kind, "created": created, "model": MODEL, "choices": choices}


def _usage(answer: Answer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.sampled_tokens
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.sampled_tokens, "total_tokens": total}
