"""The HTTP server of the page: loopback only, read only."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from miles.base.connections import SECONDS_TO_ANSWER, SECONDS_TO_ASK, BoundedServer
from miles.base.text import one_line
from miles.observe.metrics_file import to_json
from miles.observe.page import MOST_BARS, MOST_POINTS, SCRIPTS, STYLES, RunView, asset, live_page

HOST = "127.0.0.1"
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"
_LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


class ReportServer:
    """Serves the folder of one run on a port of the loopback address, in a thread, until ``close``.

    The run need not have started: until it has, the page reports it and asks again.

    Args:
        folder: The ``--output-dir`` of a run.
        port: The port; 0 takes a free one.

    Raises:
        OSError: The port is in use.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self._server = _Server((HOST, port), _Handler)
        self._server.answers = Answers(folder)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="miles report", daemon=True)
        self._thread.start()
        threading.Thread(target=self._server.answers.read_ahead, name="miles report, reading", daemon=True).start()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.port}/"

    def wait(self) -> None:
        """Block until the server is closed or the process is interrupted."""
        self._thread.join()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(BoundedServer, HTTPServer):
    answers: Answers


class WrongParameter(ValueError):
    """The parameters of a request are wrong."""


class _Parameter(NamedTuple):
    """Describe a parameter: its kind, whether it must be there, its default and, of a whole number, its bounds."""

    kind: type[str] | type[int] | type[float]
    is_needed: bool = False
    default: str | int | None = None
    least: int = 0
    most: int = 10**15


_RANGE = {"from": _Parameter(float), "to": _Parameter(float)}
_STEP = _Parameter(int, is_needed=True)
# The requests that the page may make: the parameters by name, and the answer.
_ROUTES: dict[str, tuple[dict[str, _Parameter], Callable[[RunView, Mapping[str, Any]], Any]]] = {
    "/api/overview": ({"since": _Parameter(str, default="")}, lambda view, q: view.overview(q["since"])),
    "/api/metrics": (
        {"names": _Parameter(str, default=""), **_RANGE, "points": _Parameter(int, False, MOST_POINTS, 2, 20_000)},
        lambda view, q: view.metrics(q["names"].split("\n"), q["from"], q["to"], q["points"]),
    ),
    "/api/phases": (
        {**_RANGE, "bars": _Parameter(int, False, MOST_BARS, 1, 2000)},
        lambda view, q: view.phases(q["from"], q["to"], q["bars"]),
    ),
    "/api/samples": ({"step": _Parameter(int)}, lambda view, q: view.samples(q["step"])),
    "/api/sample": ({"step": _STEP, "index": _STEP}, lambda view, q: view.sample(q["step"], q["index"])),
    "/api/search": (
        {"text": _Parameter(str, is_needed=True), "cursor": _Parameter(int, default=0)},
        lambda view, q: view.search(q["text"], q["cursor"]),
    ),
}


def _parameters(path: str, query: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the values of all parameters of ``path``.

    Raises:
        WrongParameter: Some are wrong; names each, with its value and the rule.
    """
    known, _ = _ROUTES[path]
    values: dict[str, Any] = {name: parameter.default for name, parameter in known.items()}
    faults = [f"the parameter {name} is missing" for name in known if known[name].is_needed and name not in query]
    for name, texts in query.items():
        try:
            if name not in known:
                raise ValueError(f"no such parameter; {path} has {', '.join(known)}")
            if len(texts) > 1:
                raise ValueError("must be given once")
            values[name] = _read(texts[0], known[name])
        except ValueError as error:
            faults.append(f"{one_line(name, 40)}={one_line(texts[-1], 80)}: {error}")
    if faults:
        raise WrongParameter(f"{path}: " + "; ".join(faults))
    return values


def _read(text: str, parameter: _Parameter) -> str | int | float:
    """Return the value of one parameter. Raises ``ValueError`` with the rule that it breaks."""
    if parameter.kind is str:
        return text
    if parameter.kind is int:
        least, most = parameter.least, parameter.most
        if re.fullmatch(r"[+-]?[0-9]{1,16}", text) and least <= int(text) <= most:
            return int(text)
        raise ValueError(f"must be a whole number from {least} to {most}")
    with suppress(ValueError):
        if math.isfinite(float(text)):
            return float(text)
    raise ValueError("must be a finite number; give a step")


class Answers:
    """Maps a path and its query to a JSON answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._view: RunView | None = None
        self._lock = threading.Lock()

    def __contains__(self, path: str) -> bool:
        return path in _ROUTES

    def read_ahead(self) -> None:
        """Read the metrics before the page asks for them. Errors are reported when it asks."""
        with suppress(ValueError, OSError):
            self.answer("/api/overview", {})

    def answer(self, path: str, query: Mapping[str, list[str]]) -> Any:
        """Return the answer as JSON values.

        Raises:
            WrongParameter: A parameter is wrong.
            ValueError: There is no run yet, no such sample, or a file of the run is damaged.
        """
        parameters = _parameters(path, query)
        with self._lock:
            if self._view is None:
                self._view = RunView(self._folder)
        return _ROUTES[path][1](self._view, parameters)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def parse_request(self) -> bool:
        """Read the rest of a request, and give it the time to be answered."""
        is_whole = super().parse_request()
        self.server.allow(self.connection, SECONDS_TO_ANSWER)
        return is_whole

    def handle_one_request(self) -> None:
        """Answer one request, and wait for the next one."""
        super().handle_one_request()
        self.server.allow(self.connection, SECONDS_TO_ASK)

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        name = path.removeprefix("/static/")
        if not self._is_local():
            # A page of another site whose name resolves to this address cannot read the run.
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"only for the names of this machine\n")
        elif path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", live_page().encode())
        elif path.startswith("/static/") and name in STYLES + SCRIPTS:
            kind = "text/css" if name in STYLES else "text/javascript"
            self._send(HTTPStatus.OK, f"{kind}; charset=utf-8", asset(name).encode())
        elif path in self.server.answers:
            self._answer(path, parse_qs(query, keep_blank_values=True))
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"no such page\n")

    def _answer(self, path: str, query: Mapping[str, list[str]]) -> None:
        try:
            status, answer = HTTPStatus.OK, self.server.answers.answer(path, query)
        except WrongParameter as error:
            status, answer = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except (ValueError, OSError) as error:
            status, answer = HTTPStatus.CONFLICT, {"error": str(error)}
        self._send(status, "application/json", to_json(answer))

    def _is_local(self) -> bool:
        host = self.headers.get("Host", "")
        name, _, port = host.rpartition(":")
        return (name if port.isdigit() else host) in _LOCAL_NAMES

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        try:
            self.send_response(status)
            for name, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("Content-Security-Policy", _POLICY),
                ("X-Content-Type-Options", "nosniff"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the page was closed while it waited

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal belongs to the run."""
