"""Trace several ranks at once, each in a process on a core of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from miles.arguments.settings import Settings
from miles.rehearsal.trace import RankTrace, trace_rank


@dataclass(frozen=True)
class Job:
    """The first rank of a pipeline stage, with the load of its experts relative to the average."""

    settings: Settings
    stage: int
    imbalance: float = 1.0


def trace_all(jobs: Sequence[Job]) -> list[RankTrace | str]:
    """Return the trace of each job, or why it cannot be rehearsed."""
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    if workers < 2:
        return [_trace(job) for job in jobs]
    # Forked, because importing takes as long as a trace. A fork has none of the threads of a parallel loop.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, fork, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(_trace, jobs))


def _trace(job: Job) -> RankTrace | str:
    rank = job.stage * job.settings.dims.ranks_per_stage
    try:
        return trace_rank(job.settings, rank, job.imbalance)
    except ValueError as error:
        return str(error)
