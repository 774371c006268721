"""The HTTP server of the page: loopback only, read only."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from miles.report.metrics_file import to_json
from miles.report.page import SCRIPTS, STYLES, asset, live_page
from miles.report.run_view import RunView

HOST = "127.0.0.1"
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"
_LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


class ReportServer:
    """Serves the folder of one run on a port of the loopback address, in a thread, until ``close``.

    The run need not have started: until it has, the page says so and asks again.

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


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    answers: Answers


class Answers:
    """Maps a path and its query to a JSON answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._view: RunView | None = None
        self._lock = threading.Lock()
        self._routes: dict[str, Callable[[RunView, dict[str, str]], Any]] = {
            "/api/overview": lambda view, q: view.overview(q.get("since", "")),
            "/api/metrics": lambda view, q: view.metrics(
                q.get("names", "").split("\n"), _number(q, "from"), _number(q, "to"), int(q.get("points", "1500"))
            ),
            "/api/phases": lambda view, q: view.phases(_number(q, "from"), _number(q, "to"), int(q.get("bars", "200"))),
            "/api/samples": lambda view, q: view.samples(int(q["step"]) if "step" in q else None),
            "/api/sample": lambda view, q: view.sample(int(q["step"]), int(q["index"])),
            "/api/search": lambda view, q: view.search(q["text"], int(q.get("cursor", "0"))),
        }

    def __contains__(self, path: str) -> bool:
        return path in self._routes

    def read_ahead(self) -> None:
        """Read the metrics before the page asks for them. Errors are reported when it asks."""
        with suppress(ValueError, OSError):
            self.answer("/api/overview", {})

    def answer(self, path: str, query: dict[str, str]) -> Any:
        """Return the answer as JSON values.

        Raises:
            ValueError: There is no run yet, a parameter is wrong, or a file of the run is damaged.
        """
        with self._lock:
            if self._view is None:
                self._view = RunView(self._folder)
        try:
            return self._routes[path](self._view, query)
        except KeyError as error:
            raise ValueError(f"{path}: the parameter {error} is missing") from error


def _number(query: dict[str, str], name: str) -> float | None:
    if not query.get(name):
        return None
    number = float(query[name])
    if not math.isfinite(number):
        raise ValueError(f"{name}={query[name]}: must be finite; give a step")
    return number


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        name = url.path.removeprefix("/static/")
        if not self._is_local():
            # A page of another site whose name resolves to this address cannot read the run.
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"only for the names of this machine\n")
        elif url.path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", live_page().encode())
        elif url.path.startswith("/static/") and name in STYLES + SCRIPTS:
            kind = "text/css" if name in STYLES else "text/javascript"
            self._send(HTTPStatus.OK, f"{kind}; charset=utf-8", asset(name).encode())
        elif url.path in self.server.answers:
            self._answer(url.path, {name: values[-1] for name, values in parse_qs(url.query).items()})
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"no such page\n")

    def _answer(self, path: str, query: dict[str, str]) -> None:
        try:
            status, answer = HTTPStatus.OK, self.server.answers.answer(path, query)
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
