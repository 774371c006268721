"""What a checkpoint of any backend holds beside tensors: who wrote it, how far the run is, random states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_STATE = "state.json"


def is_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` is one checkpoint of a run, and not a Hugging Face folder or a folder of checkpoints."""
    return (folder / _STATE).is_file()


def critic_folder(folder: Path) -> Path:
    """Where the critic of ``--advantage-estimator ppo`` stands in the checkpoint ``folder``."""
    return folder / "critic"


def saved_critic(folder: Path) -> Path:
    """The same, to be read. Raises ``ValueError`` for a checkpoint of a run without a critic."""
    found = critic_folder(folder)
    if not found.is_dir():
        raise ValueError(
            f"--load {folder.parent}: {folder.name} has no critic, and --advantage-estimator ppo needs one; start from "
            "the model that --save-hf exported, as --hf-checkpoint, or load a checkpoint of a run with a critic"
        )
    return found


def write_run_state(folder: Path, backend: str, launcher: dict[str, Any], schedule: dict[str, Any]) -> None:
    """Write ``state.json``; rank 0 calls it. All three must be plain JSON."""
    state = {"backend": backend, "launcher": launcher, "schedule": schedule}
    (folder / _STATE).write_text(json.dumps(state))


def read_run_state(folder: Path, backend: str, flag: str) -> dict[str, Any]:
    """What ``write_run_state`` wrote. Raises ``ValueError`` naming ``flag`` if another backend wrote it."""
    state = json.loads((folder / _STATE).read_text())
    written_by = state.get("backend", "fsdp")
    if written_by != backend:
        raise ValueError(
            f"{flag}: the checkpoint {folder.name} was written by --train-backend {written_by}, whose format "
            f"--train-backend {backend} does not read; go on with {written_by}, or export its weights with --save-hf "
            "and start from them with --hf-checkpoint"
        )
    return state


def write_random_state(folder: Path, more: dict[str, torch.Tensor] | None = None) -> None:
    """Every rank calls it: the states of PyTorch's generators, and ``more`` of the backend's own by name."""
    state = {"cpu": torch.get_rng_state(), **(more or {})}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    torch.save(state, _random_file(folder))


def restore_random_state(folder: Path) -> dict[str, torch.Tensor]:
    """Every rank calls it; returns what was given as ``more``.

    A rank that the saving run did not have goes on from its own seed, and gets nothing.
    """
    if not _random_file(folder).exists():
        return {}
    state = torch.load(_random_file(folder), weights_only=True)
    torch.set_rng_state(state.pop("cpu"))
    cuda = state.pop("cuda", None)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    return state


def _random_file(folder: Path) -> Path:
    return folder / f"random_state_rank{dist.get_rank()}.pt"
