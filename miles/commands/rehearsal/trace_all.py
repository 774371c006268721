"""Trace several ranks at once, each in a process on a core of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from miles.commands.rehearsal.trace import RankTrace, trace_rank
from miles.config.settings import Settings


@dataclass(frozen=True)
class Job:
    """The first rank of a pipeline stage, with the load of its experts relative to the average."""

    settings: Settings
    stage: int
    imbalance: float = 1.0


class Tracers:
    """The processes that trace, one for each core. A context: they end when it does.

    The first rank is traced in this process, which then has imported the backend and met most operations: that takes
    longer than the traces of other ranks do afterwards. Then this process is forked. With GPUs this process traces
    nothing: autograd starts threads for them, which a fork lacks.
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
        if self._workers < 2:
            return [_trace(job) for job in jobs]
        traces_here = self._pool is None and not torch.cuda.is_available()
        first = [_trace(job) for job in jobs[:1]] if traces_here else []
        others = jobs[len(first) :]
        if others and self._pool is None:
            fork = multiprocessing.get_context("fork")  # a fork has none of the threads of a parallel loop
            self._pool = ProcessPoolExecutor(self._workers, fork, initializer=torch.set_num_threads, initargs=(1,))
        return first + (list(self._pool.map(_trace, others)) if self._pool is not None else [])


def _trace(job: Job) -> RankTrace | str:
    rank = job.stage * job.settings.dims.ranks_per_stage
    try:
        return trace_rank(job.settings, rank, job.imbalance)
    except ValueError as error:
        return str(error)
