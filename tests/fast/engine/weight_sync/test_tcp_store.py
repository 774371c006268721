"""The store that ranks find each other with listens at one address only."""

import socket
from datetime import timedelta

import psutil
import pytest

from miles.engine.weight_sync.broadcast import TCPStore, serve_store

SHORT = timedelta(seconds=20)


def listening():
    """Return the addresses at which this process listens, other tests' among them."""
    return {c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}


@pytest.fixture(params=["127.0.0.1", "127.0.0.2", "::1"])
def host(request):
    """Return an address of the loopback interface."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        with socket.create_server((request.param, 0), family=family):
            return request.param
    except OSError as error:
        pytest.skip(f"this machine has no {request.param} ({error})")


def test_a_store_listens_at_its_address_only(host):
    before = listening()
    store = serve_store(host, SHORT)
    assert listening() - before == {(host, store.port)}
    other = TCPStore(host, store.port, is_master=False, timeout=SHORT)
    other.set("from the other", "1")
    assert store.get("from the other") == b"1"


def test_a_store_that_has_gone_listens_no_more():
    store = serve_store("127.0.0.1", SHORT)
    port = store.port
    del store
    assert ("127.0.0.1", port) not in listening()
