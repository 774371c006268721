"""Answer heartbeats, return stacks and end on request: the base of the actors of a run.

Each of these calls runs in a concurrency group, a separate thread, in asyncio actors too.
"""

import os
import time
from typing import Any

import ray

from miles.base.profiling import Recorder, read_clock
from miles.base.stacks import answer_requests, own_stacks

HEARTBEAT = "heartbeat"
REPORT = "report"  # what the launcher asks while the worker works
SAVING = "saving"  # a call that waits for a checkpoint
WEIGHTS = "weights"  # a call for all weights


def with_heartbeat(worker: type) -> Any:
    """Return ``ray.remote`` of a class with the methods of a ``WorkerActor``."""
    remote: Any = ray.remote  # whose stubs do not know concurrency groups
    return remote(concurrency_groups={HEARTBEAT: 1, REPORT: 1, SAVING: 1, WEIGHTS: 1})(worker)


class WorkerActor:
    """The base of the actors that ``Workers`` (liveness.py) watches."""

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
