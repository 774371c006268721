"""The random state of a rank in a checkpoint: ``random_state_rank*.pt``."""

from __future__ import annotations

import io
from pathlib import Path

import torch
import torch.distributed as dist

from miles.training.checkpoint_files import DamagedFile, write_through
from miles.training.checkpoint_folder import random_state_of
from miles.training.restricted_pickle import read_tensors


def write_random_state(folder: Path, more: dict[str, torch.Tensor] | None = None) -> None:
    """Write the states of PyTorch's generators, and ``more`` of the backend's own by name. Every rank calls it."""
    state = {"cpu": torch.get_rng_state(), **(more or {})}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_through(folder / random_state_of(dist.get_rank()), buffer.getvalue())


def restore_random_state(folder: Path) -> dict[str, torch.Tensor]:
    """Read what ``write_random_state`` wrote; returns ``more``. Every rank calls it.

    A rank that the saving run did not have keeps its own seed, and gets nothing. Raises ``ValueError`` for a damaged
    file.
    """
    name = random_state_of(dist.get_rank())
    if not (folder / name).exists():
        return {}
    try:
        state: dict[str, torch.Tensor] = read_tensors(folder, name)
        torch.set_rng_state(state.pop("cpu"))
        cuda = state.pop("cuda", None)
        if cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(cuda)
    except (DamagedFile, KeyError, RuntimeError, TypeError, AttributeError) as error:
        fault = error if isinstance(error, DamagedFile) else f"{name} holds no random state"
        raise ValueError(f"--load: the checkpoint {folder} is damaged: {fault}; give another one") from None
    return state
