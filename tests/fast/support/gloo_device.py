"""One thread of gloo for the connections of all process groups of a process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, distributed_c10d

WORKERS = 2  # threads that run the collective operations of a group, as torch has them


def share_gloo_device(workers: int = WORKERS) -> None:
    """Have all later process groups of this process share one device of gloo.

    By default each has its own, whose thread wakes up every 10 ms. A process that builds many backends has hundreds,
    which cost more processor time than its work. Call it in each rank, after a fork. Each group gets ``workers``
    threads for its collective operations.
    """
    device = ProcessGroupGloo.create_default_device()

    class WithSharedDevice(ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = ProcessGroupGloo._Options()
            options._devices, options._threads, options._timeout = [device], workers, timeout
            super().__init__(store, rank, size, options)

    module: Any = distributed_c10d
    module.ProcessGroupGloo = WithSharedDevice
