"""How many CPU threads a worker computes with."""

from __future__ import annotations

import os

import torch


def use_threads(device: str, sharers: int) -> None:
    """On CPU, split the cores over the ``sharers`` processes that compute at the same time.

    Ray sets OMP_NUM_THREADS to an actor's CPU tickets, which says nothing of cores here; PyTorch is told directly.
    """
    if device == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // sharers))
