"""Trace several ranks at once, each in a process on a core of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from miles.arguments.settings import Settings
from miles.components import import_code, train_backend_spec
from miles.rehearsal.trace import RankTrace, trace_rank


@dataclass(frozen=True)
class Job:
    """The first rank of a pipeline stage, with the load of its experts relative to the average."""

    settings: Settings
    stage: int
    imbalance: float = 1.0


class Tracers:
    """The processes that trace, one for each core. A context: they end when it does.

    They are forked when there is something to trace for two of them, after the backend has been imported, which takes as
    long as a trace. They know operations that they have seen before.
    """

    def __init__(self) -> None:
        self._workers = len(os.sched_getaffinity(0))
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Tracers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def trace(self, jobs: Sequence[Job]) -> list[RankTrace | str]:
        """Return the trace of each job, or why it cannot be rehearsed."""
        if self._pool is None and min(len(jobs), self._workers) < 2:
            return [_trace(job) for job in jobs]
        if self._pool is None:
            import_code(train_backend_spec(jobs[0].settings.training.train_backend), torch.device("cpu"))
            # A fork has none of the threads of a parallel loop.
            fork = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(self._workers, fork, initializer=torch.set_num_threads, initargs=(1,))
        return list(self._pool.map(_trace, jobs))


def _trace(job: Job) -> RankTrace | str:
    rank = job.stage * job.settings.dims.ranks_per_stage
    try:
        return trace_rank(job.settings, rank, job.imbalance)
    except ValueError as error:
        return str(error)
