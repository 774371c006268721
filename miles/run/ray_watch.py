"""Notice that Ray itself died: its GCS, which knows the cluster, or the raylet of this machine, which runs the workers.

No run continues without them, and calls of Ray may then wait for ever or end the process with a message of
Ray's. So a thread of the launcher looks at both and reports the first that is lost, long before Ray's own time limit.

In a cluster that was joined, workers may be on other nodes, and a run may outlive one of these. Another thread asks
their raylets (``Nodes``), and whoever waits for a worker finds there that its node was lost.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
import ray.exceptions
from ray._private import ray_constants, state
from ray._private import worker as ray_worker
from ray.exceptions import OutOfMemoryError, RayActorError

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
    own = [OwnProcess(name, psutil.Process(node.all_processes[kind][0].process.pid)) for name, kind in kinds]
    return [*own, *listeners]


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


# Say how a worker process died: by a signal that it could still log, or by one that leaves no trace.
#
# Ray does not report the signal. Its processes write ``*** SIGILL received …`` to their own log before they end by a
# fault of native code. SIGKILL, which the system sends when memory runs out, cannot be logged, and user code
# that calls ``os._exit`` leaves no trace either.


# Ray's errors for a call of an actor whose process has ended; the second if Ray has ended it to save its host.
DEATHS = (RayActorError, OutOfMemoryError)
END_BYTES = 100_000  # of a log; the stacks follow the line
_PID = re.compile(r"\bpid: (\d+)")  # in Ray's message about the death of an actor
_SIGNAL = re.compile(rb"\*\*\* (SIG[A-Z]+) received")
_BY_RAY = "Ray has ended it, as the memory of its host was nearly used up (RAY_memory_usage_threshold)"
_NO_TRACE = "out of memory, killed from outside, or ended by code of yours, as os._exit does"
_WHAT_IT_MEANS = {
    "SIGILL": "SIGILL: a library used an instruction that this CPU, or this virtual machine, does not execute; set "
    "ONEDNN_MAX_CPU_ISA=AVX2 in the environment and start again",
}


def how_it_died(death: BaseException, pid: int | None = None) -> str:
    """Return why a worker process died, as words in brackets.

    Args:
        death: Ray's error, which names the process.
        pid: The process, if the error does not name it.
    """
    if isinstance(death, OutOfMemoryError):
        return _BY_RAY
    if (with_node := how_node_ended(getattr(death, "actor_id", None))) is not None:
        return with_node
    named = _PID.search(str(death))
    process = int(named[1]) if named else pid
    if process is None:
        return _NO_TRACE
    for log in _logs_of(process):
        with suppress(OSError):  # removed meanwhile
            if match := _SIGNAL.search(end_of(log, END_BYTES)):
                name = match[1].decode()
                return _WHAT_IT_MEANS.get(name, f"{name}: a fault of native code, whose stack is above")
    return _NO_TRACE


def _logs_of(pid: int) -> Iterator[Path]:
    node: Any = ray_worker._global_node
    if node is not None:
        yield from Path(node.get_logs_dir_path()).glob(f"worker-*-{pid}.err")


def end_of(path: Path, limit: int) -> bytes:
    """Return the last whole lines of a file, at most ``limit`` bytes; the end of a line that is longer."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - limit))
        text = file.read(limit)
    return text if size <= limit else text.partition(b"\n")[2] or text


# Heartbeats of the worker processes, and waiting for their results until one of them dies or hangs.
#
# A heartbeat is a call that sleeps for HEARTBEAT_SECONDS in the worker, in its own concurrency group (a thread). It
# returns in time whatever else the worker does, and Ray fails it at once if the process dies.
HEARTBEAT_SECONDS = 10.0
HEARTBEAT_CHECK_SECONDS = 1.0  # between two checks for missing heartbeats
ASLEEP_SECONDS = 10.0  # between two checks: the launcher itself was stopped or busy
END_SECONDS = 10.0  # for workers to end on their own
BLAME_SECONDS = 5.0  # a peer's failed collective may be reported before the death that caused it


# Ray errors that the death of another worker may cause: a lost object is one that the dead worker owned.
_OF_A_DEATH = (ray.exceptions.RaySystemError, ray.exceptions.ObjectLostError, *DEATHS)
# A failure that is the end of a wait: of a collective operation, a store, an engine. The others may wait still.
_TIME_OUT = re.compile(r"tim(?:ed|e) ?-?out|\(--worker-timeout\)", re.IGNORECASE)


class ActorLost(ray.exceptions.RayError):
    """A worker process died or does not answer. The message names it; the cause, if any, is Ray's own error."""

    def __init__(self, worker: Any, message: str) -> None:
        super().__init__(message)
        self.worker = worker


@dataclass
class _Watched:
    name: str
    worker: Any  # actor handle
    heartbeat: ray.ObjectRef[Any]
    sent: float  # by time.monotonic()
    replaceable: bool
    preparing: ray.ObjectRef[Any] | None = None  # until it has ended
    pid: int | None = None  # known with the first heartbeat
    node: str | None = None  # the id of its node, known with the first heartbeat; None outside of a joined cluster
    lost: ActorLost | None = None

    def beat(self) -> None:
        """Request the next heartbeat."""
        self.heartbeat, self.sent = self.worker.heartbeat.remote(HEARTBEAT_SECONDS), time.monotonic()

    def is_preparing(self) -> bool:
        """Return whether the worker still imports; silence counts from the end of it."""
        if self.preparing is not None and ray.wait([self.preparing], timeout=0)[0]:
            self.preparing, self.sent = None, time.monotonic()
        return self.preparing is not None


class Workers:
    """The worker processes of a run: waits for their results and notices which has died or hangs.

    A worker without a heartbeat for ``seconds`` is considered hanging: it was stopped (SIGSTOP, a debugger), or its
    host was. A busy worker, compiling or in a collective, still answers as long as it lets other threads run; a
    backtracking regular expression does not. A worker may take any time to be placed and to import.
    """

    def __init__(
        self,
        seconds: float,
        longest_wait: float = 0.0,
        on_hang: Callable[[str], None] = lambda why: None,
        on_replacement: Callable[[], None] = lambda: None,
    ) -> None:
        """Watch no worker yet.

        Args:
            seconds: How long a worker may show no sign of life.
            longest_wait: How long a call may take, in seconds; 0 is no limit.
            on_hang: Called with the sentence about a wait that has exceeded its limit, before anything is ended.
            on_replacement: Called when another worker is about to replace a lost one.
        """
        self._seconds = seconds
        self._on_replacement = on_replacement
        self._longest_wait = longest_wait
        self._on_hang = on_hang
        self._watched: list[_Watched] = []
        self._looked = time.monotonic()

    def add(
        self, name: str, worker: Any, replaceable: bool = False, preparing: ray.ObjectRef[Any] | None = None
    ) -> None:
        """Watch a worker from now on.

        Args:
            name: Its name in messages.
            worker: Its handle.
            replaceable: Whether its loss is raised only to callers that wait for its results.
            preparing: A call of its imports, which may keep Python's lock: silence counts from the end of it.
        """
        heartbeat = worker.heartbeat.remote(0.0)
        self._watched.append(_Watched(name, worker, heartbeat, time.monotonic(), replaceable, preparing))

    def replace(self, worker: Any) -> None:
        """Kill a lost worker; the caller starts another instead."""
        self.end(worker)
        self._on_replacement()

    def end(self, worker: Any) -> None:
        """Kill ``worker``, whatever its state, and stop watching it."""
        for watched in [w for w in self._watched if w.worker is worker]:
            self._watched.remove(watched)
        ray.kill(worker)

    def end_directly(self, node: str | None = None) -> None:
        """Have workers end themselves, where Ray cannot end them: its GCS or their raylet does not answer.

        Args:
            node: The id of the node whose workers are meant; None for all.
        """
        meant = [each.worker for each in self._watched if node is None or each.node == node]

        def end() -> None:
            ended = [worker.end_process.remote() for worker in meant]  # straight to the worker
            if ended:
                ray.wait(ended, num_returns=len(ended), timeout=END_SECONDS)

        ending = threading.Thread(target=end, name="ending-workers", daemon=True)
        ending.start()
        ending.join(END_SECONDS + 1.0)  # without a GCS, a call of Ray may wait for ever

    def pids(self) -> dict[int, str]:
        """Return the names of the workers by process id, as far as these are known."""
        return {watched.pid: watched.name for watched in self._watched if watched.pid is not None}

    def describe(self, seconds: float) -> dict[str, str]:
        """Return the ``describe()`` of each worker, by name; without those that do not answer in time."""
        calls = {watched.worker.describe.remote(): watched.name for watched in self._watched if watched.lost is None}
        ready = ray.wait(list(calls), num_returns=len(calls), timeout=seconds)[0] if calls else []
        answers = {}
        for call in ready:
            with suppress(ray.exceptions.RayError):  # it has died
                answers[calls[call]] = ray.get(call)
        return answers

    def results(
        self, calls: Sequence[ray.ObjectRef[Any]], alongside: Sequence[ray.ObjectRef[Any]] = (), whose: Any = None
    ) -> list[Any]:
        """Return the results of ``calls`` in order.

        The first failure of any call, or of a call in ``alongside``, is raised at once, because its peers may hang.

        Raises:
            ActorLost: If a worker of the run dies or hangs (a replaceable one: only if the calls are ``whose``), and
                if a call takes longer than the longest wait. It is also raised instead of a failure that the loss
                caused in another worker.
        """
        pending = [*calls, *alongside]
        began = time.monotonic()
        while any(call in pending for call in calls):
            self._look(whose)
            if self._longest_wait and time.monotonic() - began > self._longest_wait:
                raise self._hangs(
                    whose, f"a step of the run has not ended within {self._longest_wait:g} s (--wait-timeout)"
                )
            done, _ = ray.wait([*pending, *self._heartbeats()], timeout=HEARTBEAT_CHECK_SECONDS)
            for call in [call for call in done if call in pending]:
                self._checked(call, whose)
                pending.remove(call)
        return ray.get(list(calls))

    def result(self, call: ray.ObjectRef[Any]) -> Any:
        """Return the result of one call; see ``results``."""
        return self.results([call])[0]

    def _heartbeats(self) -> list[ray.ObjectRef[Any]]:
        return [watched.heartbeat for watched in self._watched if watched.lost is None]

    def _checked(self, call: ray.ObjectRef[Any], whose: Any) -> None:
        try:
            ray.get(call)
        except (RuntimeError, OSError, *_OF_A_DEATH) as failure:
            until = time.monotonic() + BLAME_SECONDS
            self._look(whose)
            while (heartbeats := self._heartbeats()) and (left := until - time.monotonic()) > 0:
                ray.wait(heartbeats, timeout=left)
                self._look(whose)
            # Not the traceback of the worker, whose lines of code may say anything.
            cause = failure.cause if isinstance(failure, ray.exceptions.RayTaskError) else failure
            if _TIME_OUT.search(f"{type(cause).__name__}: {cause}"):
                self._on_hang(str(cause).partition("\n")[0])
            raise failure

    def _hangs(self, worker: Any, why: str) -> ActorLost:
        self._on_hang(why)
        return ActorLost(worker, why)

    def _look(self, whose: Any) -> None:
        """Read the heartbeats; raise ``ActorLost`` for a lost worker."""
        now = time.monotonic()
        if (asleep := now - self._looked) > ASLEEP_SECONDS:  # answers may have arrived unread
            for watched in self._watched:
                watched.sent += asleep
        self._looked = now
        heartbeats = self._heartbeats()
        ready = ray.wait(heartbeats, num_returns=len(heartbeats), timeout=0)[0] if heartbeats else []
        for watched in self._watched:
            if watched.lost is None:
                watched.lost = self._lost(watched, watched.heartbeat in ready)
            if watched.lost is not None and (watched.worker is whose or not watched.replaceable):
                raise watched.lost

    def _lost(self, watched: _Watched, answered: bool) -> ActorLost | None:
        """Return how ``watched`` was lost, or None if it is alive; one that answered gets the next request."""
        if (loss := loss_of_node(watched.node)) is not None:
            self.end_directly(watched.node)
            return ActorLost(watched.worker, f"{watched.name} (process {watched.pid}) is lost with its node: {loss}")
        if not answered:
            longest = HEARTBEAT_SECONDS + self._seconds
            if watched.is_preparing() or watched.pid is None or time.monotonic() - watched.sent <= longest:
                return None
            return self._hangs(
                watched.worker,
                f"{watched.name} (process {watched.pid}) has shown no sign of life for {self._seconds:g} s: it was "
                "stopped, its host hangs, or code in it holds Python's lock, as a regular expression may "
                "(--worker-timeout)",
            )
        is_first = watched.pid is None
        try:
            watched.pid = ray.get(watched.heartbeat)
            if is_first:
                watched.node = node_of(watched.worker)
        except DEATHS as death:
            look_at_node()  # does not return if Ray itself was lost
            lost = ActorLost(watched.worker, f"{watched.name} died ({how_it_died(death, watched.pid)})")
            lost.__cause__ = death
            return lost
        watched.beat()
        return None
