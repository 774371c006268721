"""Megatron-Core: tensor, pipeline, context, expert and data parallel, on gloo and NCCL alike."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from miles.config.settings import Settings
    from miles.training.backend import LeaveOut, RehearsedBackend, TrainBackend
    from miles.training.megatron.backend import MegatronBackend

# When it is imported, Megatron warns of every optional package that is not there; nothing here needs one.
warnings.filterwarnings("ignore", module=r"megatron\.core\.")


def export(settings: Settings, checkpoint: Path, folder: Path) -> None:
    """Write the weights of ``checkpoint`` into ``folder`` as a Hugging Face export. One rank, on CPU."""
    from miles.training.megatron.cpu_support import support_cpu

    support_cpu()
    from miles.training.megatron.backend import export as export_on_cpu

    export_on_cpu(settings, checkpoint, folder)


def import_backend(device: torch.device) -> type[MegatronBackend]:
    """Import the backend. On CPU, what Megatron needs there comes before Megatron is imported."""
    if device.type == "cpu":
        from miles.training.megatron.cpu_support import support_cpu

        support_cpu()
    from miles.training.megatron.backend import MegatronBackend

    return MegatronBackend


def build(settings: Settings, device: torch.device, total_steps: int) -> TrainBackend:
    """Build the backend of this rank."""
    return import_backend(device)(settings, device, total_steps)


def build_rehearsed(
    settings: Settings, device: torch.device, total_steps: int, leave_out: LeaveOut, imbalance: float
) -> AbstractContextManager[RehearsedBackend]:
    """Build a rank without weights, under fake tensors (training/backend.py)."""
    from miles.training.megatron.cpu_support import support_cpu

    support_cpu()
    from miles.training.megatron.rehearsed import rehearsed

    return rehearsed(settings, device, total_steps, leave_out, imbalance)
