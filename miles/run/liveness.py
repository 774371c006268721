"""Worker processes of a run: the base of their actors, and the launcher's watch for the dead and the silent ones."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray._private import worker as ray_worker
from ray.exceptions import OutOfMemoryError, RayActorError

from miles.base.profiling import Recorder, read_clock
from miles.base.stacks import answer_requests, own_stacks
from miles.run.ray_watch import how_node_ended, look_at_node, loss_of_node, node_of

# The base of the actors of a run: each answers heartbeats, returns its stacks and ends on request.
#
# Each of these calls runs in a concurrency group, a separate thread, in asyncio actors too.


HEARTBEAT = "heartbeat"
REPORT = "report"  # what the launcher asks while the worker works
SAVING = "saving"  # a call that waits for a checkpoint
WEIGHTS = "weights"  # a call for all weights


def with_heartbeat(worker: type) -> Any:
    """Return ``ray.remote`` of a class with the methods of a ``WorkerActor``."""
    remote: Any = ray.remote  # whose stubs do not know concurrency groups
    return remote(concurrency_groups={HEARTBEAT: 1, REPORT: 1, SAVING: 1, WEIGHTS: 1})(worker)


class WorkerActor:
    """The base of the actors that ``Workers`` watches."""

    def __init__(self) -> None:
        answer_requests()

    @ray.method(concurrency_group=HEARTBEAT)
    def heartbeat(self, seconds: float) -> int:
        """Return this process's id after ``seconds``. Ray fails the call at once if the process ends."""
        time.sleep(seconds)
        return os.getpid()

    @ray.method(concurrency_group=REPORT)
    def describe(self) -> Any:
        """Return the stacks of this process, for the report of a hang."""
        return own_stacks()

    @ray.method(concurrency_group=REPORT)
    def end_process(self) -> Any:
        """End this process at once."""
        os._exit(0)


class ProfiledActor(WorkerActor):
    """A worker that records its work on request, under ``name``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.recorder = Recorder(name)

    def start_profile(self) -> Any:
        """Record the work of this process from now on."""
        self.recorder.start()

    def stop_profile(self) -> Any:
        """Return the recording, a list of ``ProcessTrace``; empty in a process that replaced another meanwhile."""
        recorded = self.recorder.stop()
        return [] if recorded is None else [recorded]

    def read_clock(self) -> tuple[str, int]:
        """Return the name of this process's clock, and its time."""
        return read_clock()


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


@dataclass(eq=False)
class Workers:
    """The worker processes of a run: waits for their results and notices which has died or hangs.

    A worker without a heartbeat for ``seconds`` is considered hanging: it was stopped (SIGSTOP, a debugger), or its
    host was. A busy worker, compiling or in a collective, still answers as long as it lets other threads run; a
    backtracking regular expression does not. A worker may take any time to be placed and to import.

    Attributes:
        seconds: How long a worker may show no sign of life.
        longest_wait: How long a call may take, in seconds; 0 is no limit.
        on_hang: Called with the sentence about a wait that has exceeded its limit, before anything is ended.
        on_replacement: Called when another worker is about to replace a lost one.
    """

    seconds: float
    longest_wait: float = 0.0
    on_hang: Callable[[str], None] = lambda why: None
    on_replacement: Callable[[], None] = lambda: None
    _watched: list[_Watched] = field(default_factory=list)
    _looked: float = field(default_factory=time.monotonic)

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
        self.on_replacement()

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
            if self.longest_wait and time.monotonic() - began > self.longest_wait:
                raise self._hangs(
                    whose, f"a step of the run has not ended within {self.longest_wait:g} s (--wait-timeout)"
                )
            done, _ = ray.wait([*pending, *self._heartbeats()], timeout=HEARTBEAT_CHECK_SECONDS)
            for call in [call for call in done if call in pending]:
                self._check(call, whose)
                pending.remove(call)
        return ray.get(list(calls))

    def _heartbeats(self) -> list[ray.ObjectRef[Any]]:
        return [watched.heartbeat for watched in self._watched if watched.lost is None]

    def _check(self, call: ray.ObjectRef[Any], whose: Any) -> None:
        """Raise the failure of a call that has ended, or ``ActorLost`` for the loss that caused it."""
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
                self.on_hang(str(cause).partition("\n")[0])
            raise failure

    def _hangs(self, worker: Any, why: str) -> ActorLost:
        self.on_hang(why)
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
            longest = HEARTBEAT_SECONDS + self.seconds
            if watched.is_preparing() or watched.pid is None or time.monotonic() - watched.sent <= longest:
                return None
            return self._hangs(
                watched.worker,
                f"{watched.name} (process {watched.pid}) has shown no sign of life for {self.seconds:g} s: it was "
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
