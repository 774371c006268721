"""Notice that Ray itself died: its GCS, which knows the cluster, or the raylet of this machine, which runs the workers.

No run continues without them, and calls of Ray may then wait for ever or end the process with a message of
Ray's. So a thread of the launcher looks at both and reports the first that is lost, long before Ray's own time limit.

In a cluster that was joined, workers may be on other nodes, and a run may outlive one of these. Another thread asks
their raylets (``Nodes``), and whoever waits for a worker finds there that its node was lost.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import ray
import ray.exceptions
from ray._private import ray_constants, state
from ray._private import worker as ray_worker

LOOK_SECONDS = 0.2
LOST_SECONDS = 30.0  # without an answer, or stopped; Ray's own limit is 60 s
CONNECT_SECONDS = 5.0
# How an HTTP/2 client begins. Servers of Ray answer it, and do not if they are stopped; the kernel still accepts then.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass
class OwnProcess:
    """A process of Ray that the launcher started."""

    name: str
    process: psutil.Process
    _runs: float = field(default_factory=time.monotonic)  # when it was last seen not to be stopped

    def loss(self) -> str | None:
        """Return what happened to the process, or None if it is alive."""
        try:
            status = self.process.status()
        except psutil.NoSuchProcess:
            status = psutil.STATUS_ZOMBIE
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return f"{self.name} (process {self.process.pid}) died (out of memory, or killed from outside)"
        if status not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            self._runs = time.monotonic()
        elif time.monotonic() - self._runs > LOST_SECONDS:
            return f"{self.name} (process {self.process.pid}) has been stopped for {LOST_SECONDS:g} s (SIGSTOP)"
        return None

    def before_shutdown(self) -> None:
        """Have the process continue if it is stopped: Ray's shutdown waits for its answer without a limit."""
        with suppress(psutil.NoSuchProcess):
            if self.process.status() == psutil.STATUS_STOPPED:
                self.process.resume()


@dataclass
class Listener:
    """A process of Ray, identified by the address at which it listens."""

    name: str
    address: str | tuple[str, int]  # a path, or host and port
    is_own: bool = False  # of a Ray that this run has started: an OwnProcess notices that it is stopped
    _patience: float = field(default_factory=lambda: LOST_SECONDS)
    _answered: float = field(default_factory=time.monotonic)
    _asked: float = field(default_factory=time.monotonic)

    def loss(self) -> str | None:
        """Return that the process does not answer any more, or None while it does. Connects every few seconds."""
        if time.monotonic() - self._asked < CONNECT_SECONDS:
            return None
        try:
            _connect(self.address, greets=not self.is_own)
            self._answered = time.monotonic()
        except OSError as error:
            silent = time.monotonic() - self._answered
            if silent >= self._patience:
                return f"{self.name} at {self._where()} has not answered for {silent:.0f} s ({error.strerror or error})"
        finally:
            self._asked = time.monotonic()
        return None

    def before_shutdown(self) -> None:
        """Stop waiting for a part that does not answer."""
        if self.is_own:
            self._patience, self._asked = 0.0, -CONNECT_SECONDS

    def _where(self) -> str:
        return self.address if isinstance(self.address, str) else ":".join(map(str, self.address))


def _connect(address: str | tuple[str, int], greets: bool) -> None:
    """Connect to a process of Ray, and wait for an answer if ``greets``. Raises ``OSError`` without one."""
    if isinstance(address, str):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(CONNECT_SECONDS)
            probe.connect(address)
        return
    with socket.create_connection(address, CONNECT_SECONDS) as probe:
        if greets:
            probe.sendall(_GREETING)
            probe.recv(1)


def parts_of_ray() -> list[OwnProcess | Listener]:
    """Return what to watch of the Ray to which this process is connected."""
    node: Any = ray_worker._global_node
    gcs, raylet = "Ray's GCS", "Ray's raylet"
    host, _, port = node.gcs_address.rpartition(":")
    address = host.strip("[]"), int(port)
    if not node.head:
        this_node = _in_table(ray.get_runtime_context().get_node_id())
        return [Listener(gcs, address), Listener(raylet, _address(this_node))]
    # A separate process as well: after SIGTERM the GCS stays for a minute, and answers nobody.
    listeners = [Listener(gcs, address, is_own=True), Listener(raylet, node.raylet_socket_name, is_own=True)]
    kinds = ((gcs, ray_constants.PROCESS_TYPE_GCS_SERVER), (raylet, ray_constants.PROCESS_TYPE_RAYLET))
    processes = [OwnProcess(name, psutil.Process(node.all_processes[kind][0].process.pid)) for name, kind in kinds]
    return [*processes, *listeners]


@dataclass
class OwnNode:
    """This machine as Ray's GCS knows it, and the raylet that stands for it.

    A raylet that gets SIGTERM first signs off there, then ends its workers, and itself last.
    """

    raylet: int  # process id
    node_id: str

    def loss(self) -> str | None:
        """Return that the raylet has signed off, or None. Asks the GCS, which may take as long as Ray waits for it."""
        for node in ray.nodes():
            if node["NodeID"] == self.node_id and not node["Alive"]:
                why = node.get("DeathReasonMessage") or "out of memory, or killed from outside"
                return f"Ray's raylet (process {self.raylet}) died ({why}), and its workers with it"
        return None


def is_hang(loss: str) -> bool:
    """Return whether the process of a loss is still there."""
    return " died (" not in loss


def own_node() -> OwnNode | None:
    """Return this machine in a Ray that this process has started; None in a cluster that it has joined."""
    node: Any = ray_worker._global_node
    if not node.head:
        return None
    raylet = node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process
    return OwnNode(raylet.pid, ray.get_runtime_context().get_node_id())


def _in_table(node_id: str) -> dict[str, Any]:
    """Return the record of the GCS about a node. Asks it, which may take as long as Ray waits for it."""
    return next(node for node in ray.nodes() if node["NodeID"] == node_id)


def _address(node: dict[str, Any]) -> tuple[str, int]:
    """Return the address of a node's raylet."""
    return node["NodeManagerAddress"], node["NodeManagerPort"]


class Nodes:
    """The nodes of a joined cluster on which the run has workers, and what happened to those that are lost.

    A thread asks their raylets, as each of a host that hangs takes as long as a connection may.
    """

    def __init__(self) -> None:
        self._listeners: dict[str, Listener] = {}
        self._losses: dict[str, str] = {}
        self._ended = threading.Event()

    def watch(self, node_id: str) -> None:
        """Ask the raylet of a node every few seconds from now on."""
        if node_id in self._listeners:
            return
        listener = Listener("Ray's raylet", _address(_in_table(node_id)))
        self._listeners = self._listeners | {node_id: listener}  # which the thread may be reading
        if len(self._listeners) == 1:
            threading.Thread(target=self._run, name="ray-nodes", daemon=True).start()

    def loss(self, node_id: str) -> str | None:
        """Return what happened to a node if its raylet has not answered for long, or None."""
        return self._losses.get(node_id)

    def end(self) -> None:
        """Ask no more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            for node_id, listener in self._listeners.items():
                if node_id not in self._losses and (loss := listener.loss()) is not None:
                    self._losses[node_id] = loss


def node_of(worker: Any) -> str | None:
    """Return the id of a worker's node, and watch that from now on; None outside of a joined cluster.

    Args:
        worker: The handle of an actor that Ray has placed.
    """
    for nodes in _joined():
        if (node_id := _node_id(worker._actor_id.hex())) is not None:
            nodes.watch(node_id)
            return node_id
    return None


def loss_of_node(node_id: str | None) -> str | None:
    """Return what happened to a node of a joined cluster that has not answered for long, or None. Asks nobody."""
    return next((nodes.loss(node_id) for nodes in _joined() if node_id is not None), None)


def how_node_ended(actor_id: str | None) -> str | None:
    """Return, as words in brackets, that a worker has died with its node; None if the node is alive.

    Ray takes a while to notice the death of a node, so its raylet is asked too.

    Args:
        actor_id: The dead worker, if it is known.
    """
    if not any(_joined()) or actor_id is None or (node_id := _node_id(actor_id)) is None:
        return None
    node = _in_table(node_id)
    words = f"with its node {node['NodeManagerAddress']}: "
    if not node["Alive"]:
        return words + (node["DeathReasonMessage"] or "Ray does not say why")
    try:
        _connect(_address(node), greets=True)
    except OSError as error:
        return f"{words}Ray's raylet there does not answer, {error.strerror or error}"
    return None


def are_alive(node_ids: Collection[str]) -> bool:
    """Return whether all of these nodes of a joined cluster are alive."""
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    try:
        for node_id in node_ids:
            if node_id not in alive or loss_of_node(node_id) is not None:
                return False
            _connect(_address(alive[node_id]), greets=True)
    except OSError:
        return False
    return True


def _node_id(actor_id: str) -> str | None:
    """Return the id of the node on which an actor is or was; None if Ray has not placed it."""
    actor = state.actors(actor_id)
    return actor["Address"]["NodeID"] if actor else None


def _joined() -> list[Nodes]:
    return [watch.nodes for watch in _current if watch.nodes is not None]


_current: list[RayWatch] = []  # at most one: a process is connected to one Ray


def look_at_node() -> None:
    """Report the loss of Ray now if that is why a worker has died, before its death is taken for the cause."""
    for watch in _current:
        watch.look_at_node()


class RayWatch:
    """Look at parts of Ray in a thread, and call ``on_loss`` once with what happened to the first that is lost.

    Args:
        parts: The parts of Ray that the thread looks at.
        on_loss: Called with a sentence, in the thread that has found the loss.
        node: The node that ``look_at_node`` asks; None in a joined cluster, whose ``nodes`` are watched instead.
    """

    def __init__(
        self,
        parts: Iterable[OwnProcess | Listener],
        on_loss: Callable[[str], None],
        node: OwnNode | None = None,
    ) -> None:
        self._parts = list(parts)
        self._node = node
        self._on_loss = on_loss
        self.nodes = Nodes() if node is None else None
        self._ended = threading.Event()
        _current.append(self)
        self._looking = threading.Lock()
        threading.Thread(target=self._run, name="ray-watch", daemon=True).start()

    def look_at_node(self) -> None:
        """Report that this machine has left Ray's cluster, if it has."""
        loss = None if self._node is None else self._node.loss()
        with self._looking:
            self._report(loss)

    def look(self) -> None:
        """Report a loss now, if there is one that was not reported."""
        with self._looking:
            if not self._ended.is_set():
                self._report(next(filter(None, (part.loss() for part in self._parts)), None))

    def _report(self, loss: str | None) -> None:
        if loss is not None and not self._ended.is_set():
            self._ended.set()
            self._on_loss(loss)

    def end_with_ray(self) -> None:
        """Report at once what does not answer, until Ray's shutdown in this process ends Ray's own processes.

        The GCS may still be ending after a signal to all processes of the run. Ray's shutdown waits for it for a
        minute, and then ends the process with a message of Ray's.
        """
        with self._looking:
            for part in self._parts:
                part.before_shutdown()
        self.look()
        node: Any = ray_worker._global_node
        if node is None:  # Ray did not start
            self.end()
            return
        kill = node.kill_all_processes

        def end_first(*arguments: Any, **options: Any) -> None:
            self.end()
            kill(*arguments, **options)

        node.kill_all_processes = end_first

    def end(self) -> None:
        """Look no more."""
        with self._looking:
            self._ended.set()
        if self.nodes is not None:
            self.nodes.end()
        if self in _current:
            _current.remove(self)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.look()
