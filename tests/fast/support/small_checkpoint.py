"""Complete checkpoints of a few tensors, written with the functions that a run uses, for tests without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from miles.training.checkpoint_files import publish, staging, write_run_state
from miles.training.checkpoint_io import write_random_state
from miles.training.one_process import one_rank

PROMPTS = {"num_prompts": 8, "shuffle": True, "seed": 42, "epoch": 0, "position": 3, "next_group_index": 3}
LAUNCHER = {"rollouts_done": 2, "prompts": PROMPTS, "run": {"id": "abc", "started": "2026-01-01 10:00:00"}}


def tensors() -> dict[str, Any]:
    numbers = torch.arange(6, dtype=torch.float32).view(2, 3)
    return {"model": {"w": numbers}, "optimizer": {"w": {"lr": 0.5, "betas": (0.9, 0.999), "exp_avg": numbers + 1}}}


def save_checkpoint(root: Path, iterations: int, **launcher: Any) -> Path:
    """Save and publish a checkpoint after some iterations."""
    folder = staging(root, iterations)
    with one_rank():
        dcp.save(tensors(), checkpoint_id=folder)
        write_random_state(folder)
        write_run_state(folder, "fsdp", LAUNCHER | {"rollouts_done": iterations} | launcher, {"steps_done": iterations})
    return publish(root, iterations)
