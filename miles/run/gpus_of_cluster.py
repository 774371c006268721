"""Count the GPUs of a running Ray cluster: ``python -m miles.run.gpus_of_cluster ADDRESS SECONDS``.

Validation, which imports no Ray, starts this program (``config/choice.py``). It asks the cluster's
head (its GCS), as ``ray status`` does, with two names that Ray does not document: Ray's public calls need a process of
Ray on this host, or the dashboard, and a cluster may have neither.
"""

import json
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

AUTO = "auto"  # the cluster that was started on this host


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """End this process by SIGALRM if the block takes longer: native code that waits would not stop for an exception."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def knock(address: str) -> None:
    """Open and close a connection to HOST:PORT.

    Raises:
        OSError: Nothing answers there.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port))).close()


def gpus_of_cluster(address: str, seconds: float) -> float:
    """Return the GPUs of all nodes that are alive.

    Args:
        address: HOST:PORT of the head, or auto.
        seconds: The longest time to wait for it. Importing Ray does not count: it takes long on a busy host.

    Raises:
        OSError: Nothing answers there.
        Exception: Ray does not tell, for a reason that the message states.
    """
    if address != AUTO:
        with _limited(seconds):
            knock(address)  # before Ray is imported, which takes longer than this
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module without stubs

    with _limited(seconds):
        head = canonicalize_bootstrap_address(address)
        if head is None:
            raise ConnectionError("no Ray was started on this host")
        nodes = GcsClient(address=head).get_all_node_info(timeout=seconds).values()
    gpus: float = sum(node.resources_total.get("GPU", 0) for node in nodes if node.state == node.ALIVE)
    return gpus


def main() -> None:
    """Print the number of GPUs, or why it is not known, as one line of JSON."""
    address, seconds = sys.argv[1:]
    answer: dict[str, float | str]
    try:
        answer = {"gpus": gpus_of_cluster(address, float(seconds))}
    except Exception as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        answer = {"fault": text or type(error).__name__}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
