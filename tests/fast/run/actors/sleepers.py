"""Workers that do nothing, and fail on request. Ray imports this module in them, so it imports little."""

import os
import threading
import time

import ray

from miles.run.liveness import HEARTBEAT, REPORT, WorkerActor

FOR_EVER = 10**6


class Silent(WorkerActor):
    """A worker that answers its first heartbeat only."""

    def sleep(self, seconds):
        time.sleep(seconds)

    @ray.method(concurrency_group=HEARTBEAT)
    def heartbeat(self, seconds):
        time.sleep(FOR_EVER if seconds else 0)
        return os.getpid()


class Sleeper(WorkerActor):
    def __init__(self):
        super().__init__()
        self._woken = threading.Event()

    def sleep(self, seconds):
        self._woken.wait(seconds)
        return seconds

    @ray.method(concurrency_group=REPORT)
    def wake(self):
        """End all calls of ``sleep`` before ``rest``."""
        self._woken.set()

    def rest(self):
        self._woken.clear()

    def leave(self):
        os._exit(7)

    def fail(self, error):
        raise error  # a comment with timeout, which the traceback shows
