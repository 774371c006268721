"""Bound an HTTP server of a run: its connections and the time of a request. It never takes the last descriptors."""

import resource
import socket
import sys
import threading
import time
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any

SECONDS_TO_ASK = 10.0  # for a connection to send a whole request
SECONDS_TO_ANSWER = 120.0  # to compute an answer, and for the client to take it
MOST = 64  # connections of one server
RESERVED = 128  # descriptors that no connection takes; a quarter of the limit if it is low


def leaves_descriptors(connection: socket.socket) -> bool:
    """Return whether descriptors remain for the run alongside ``connection``, which was accepted just now.

    A new descriptor is the lowest number that is free, so all below it are in use.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit == resource.RLIM_INFINITY or connection.fileno() < limit - min(RESERVED, limit // 4)


class BoundedServer(ThreadingMixIn):
    """A server of threads that closes connections: those whose time is up and, at the limit, the one nearest to it."""

    daemon_threads = True
    request_queue_size = 128  # that wait to be taken: with the usual 5, a client tries again after a second

    def __init__(self, *args: Any, **named: Any) -> None:
        self._ends: dict[Any, float] = {}  # when the time of an open connection is up, by time.monotonic()
        self._lock = threading.Lock()
        super().__init__(*args, **named)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take or refuse a new connection."""
        if not leaves_descriptors(request):
            return False
        with self._lock:
            if len(self._ends) >= MOST:
                self._end(min(self._ends, key=self._ends.__getitem__))
            self._ends[request] = time.monotonic() + SECONDS_TO_ASK
        return True

    def allow(self, request: Any, seconds: float) -> None:
        """Give an open connection so many seconds from now on."""
        with self._lock:
            if request in self._ends:
                self._ends[request] = time.monotonic() + seconds

    def service_actions(self) -> None:
        """Close the connections whose time is up; ``serve_forever`` calls this twice in a second."""
        now = time.monotonic()
        with self._lock:
            for request in [request for request, end in self._ends.items() if end < now]:
                self._end(request)

    def _end(self, request: Any) -> None:
        del self._ends[request]
        with suppress(OSError):  # the client has gone
            request.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._ends.pop(request, None)
        super().shutdown_request(request)  # type: ignore[misc]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show the error of a request, unless the client has gone or its time was up."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[misc]
