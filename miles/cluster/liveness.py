"""Which worker processes live. The launcher waits for their work, and its wait ends when one of them dies or hangs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions

# A heartbeat is a call that sleeps so long in the worker, in a concurrency group (a thread) of its own: it comes back
# in time whatever else the worker does, and Ray fails it at once when the process dies.
PULSE = "pulse"
PULSE_SECONDS = 10.0
LOOK_SECONDS = 1.0  # from one look for missing heartbeats to the next
ASLEEP_SECONDS = 10.0  # from one look to the next: the launcher itself was stopped, or busy elsewhere
BLAME_SECONDS = 5.0  # a peer's failed collective may be told before the death that it comes from


def with_pulse(worker: type) -> Any:
    """``ray.remote`` of a class with a method ``pulse(seconds)`` in that group, which returns its process id."""
    remote: Any = ray.remote  # whose stubs do not know concurrency groups
    return remote(concurrency_groups={PULSE: 1})(worker)


# Ray's errors that the death of another worker may cause: a lost object is one that it had made.
_OF_A_DEATH = (ray.exceptions.RaySystemError, ray.exceptions.RayActorError, ray.exceptions.ObjectLostError)


class WorkerLost(ray.exceptions.RayError):
    """A worker process has died, or answers nothing. The message names it; the cause, if any, is Ray's own error."""

    def __init__(self, worker: Any, message: str) -> None:
        super().__init__(message)
        self.worker = worker


@dataclass
class _Watched:
    name: str
    worker: Any  # actor handle
    pulse: ray.ObjectRef
    sent: float  # by time.monotonic()
    replaceable: bool
    pid: int | None = None  # known with the first heartbeat
    lost: WorkerLost | None = None

    def beat(self) -> None:
        """Ask for the next heartbeat."""
        self.pulse, self.sent = self.worker.pulse.remote(PULSE_SECONDS), time.monotonic()


class Workers:
    """The workers of a run, and how to wait for what they do.

    A worker without a heartbeat for ``seconds`` hangs: it was stopped (SIGSTOP, a debugger), or its host has. What a
    worker is busy with does not count, compiling and collectives included, as long as it lets other threads run: a
    regular expression that backtracks does not. Until its first heartbeat a worker may take as long as it needs, to be
    placed and to import.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._watched: list[_Watched] = []
        self._looked = time.monotonic()

    def add(self, name: str, worker: Any, replaceable: bool = False) -> None:
        """Watch ``worker`` from now on; messages call it ``name``. A ``replaceable`` one is missed only by who waits
        for its work."""
        self._watched.append(_Watched(name, worker, worker.pulse.remote(0.0), time.monotonic(), replaceable))

    def end(self, worker: Any) -> None:
        """Kill ``worker``, whatever state it is in, and watch it no more."""
        for watched in [w for w in self._watched if w.worker is worker]:
            self._watched.remove(watched)
        ray.kill(worker)

    def results(
        self, calls: Sequence[ray.ObjectRef], beside: Sequence[ray.ObjectRef] = (), whose: Any = None
    ) -> list[Any]:
        """The results of ``calls`` in order.

        Raises the first failure of any of them, or of one ``beside`` them, at once: its peers may hang for it. Raises
        ``WorkerLost`` when a worker of the run dies or hangs (a replaceable one: when it is ``whose`` calls these are),
        which is also told in the place of a failure that it has caused in another worker.
        """
        pending = [*calls, *beside]
        while any(call in pending for call in calls):
            self._look(whose)
            done, _ = ray.wait([*pending, *self._pulses()], timeout=LOOK_SECONDS)
            for call in [call for call in done if call in pending]:
                self._checked(call, whose)
                pending.remove(call)
        return ray.get(list(calls))

    def result(self, call: ray.ObjectRef) -> Any:
        """The result of one call; see ``results``."""
        return self.results([call])[0]

    def _pulses(self) -> list[ray.ObjectRef]:
        return [watched.pulse for watched in self._watched if watched.lost is None]

    def _checked(self, call: ray.ObjectRef, whose: Any) -> None:
        try:
            ray.get(call)
        except (RuntimeError, OSError, *_OF_A_DEATH) as failure:
            until = time.monotonic() + BLAME_SECONDS
            self._look(whose)
            while (pulses := self._pulses()) and (left := until - time.monotonic()) > 0:
                ray.wait(pulses, timeout=left)
                self._look(whose)
            raise failure

    def _look(self, whose: Any) -> None:
        """Read the heartbeats. Raises ``WorkerLost`` for a worker that is missed."""
        now = time.monotonic()
        if (asleep := now - self._looked) > ASLEEP_SECONDS:  # answers may have come that nobody has read yet
            for watched in self._watched:
                watched.sent += asleep
        self._looked = now
        pulses = self._pulses()
        ready = ray.wait(pulses, num_returns=len(pulses), timeout=0)[0] if pulses else []
        for watched in self._watched:
            if watched.lost is None:
                watched.lost = self._lost(watched, watched.pulse in ready)
            if watched.lost is not None and (watched.worker is whose or not watched.replaceable):
                raise watched.lost

    def _lost(self, watched: _Watched, answered: bool) -> WorkerLost | None:
        """How ``watched`` is lost; None where it lives. One that has answered is asked again."""
        if not answered:
            if watched.pid is None or time.monotonic() - watched.sent <= PULSE_SECONDS + self._seconds:
                return None
            return WorkerLost(
                watched.worker,
                f"{watched.name} (process {watched.pid}) has shown no sign of life for {self._seconds:g} s: it was "
                "stopped, its host hangs, or code in it holds Python's lock, as a regular expression may "
                "(--worker-timeout)",
            )
        try:
            watched.pid = ray.get(watched.pulse)
        except ray.exceptions.RayActorError as death:
            lost = WorkerLost(watched.worker, f"{watched.name} died (out of memory, or killed from outside)")
            lost.__cause__ = death
            return lost
        watched.beat()
        return None
