"""The training backends by the names of ``--train-backend``. Importing one leaves the others alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from miles.arguments.settings import Settings
from miles.training.backend import TrainBackend


def _fsdp(settings: Settings, device: torch.device, total_steps: int) -> TrainBackend:
    from miles.training.fsdp.backend import FsdpBackend

    return FsdpBackend(settings, device, total_steps)


def _megatron(settings: Settings, device: torch.device, total_steps: int) -> TrainBackend:
    if device.type == "cpu":
        from miles.training.megatron.cpu_support import support_cpu

        support_cpu()  # before Megatron is imported
    from miles.training.megatron.backend import MegatronBackend

    return MegatronBackend(settings, device, total_steps)


BACKENDS: dict[str, Callable[[Settings, torch.device, int], TrainBackend]] = {"fsdp": _fsdp, "megatron": _megatron}


def build_backend(settings: Settings, device: torch.device, total_steps: int) -> TrainBackend:
    """Build this rank of the backend that ``--train-backend`` names. Collective; the process group is initialized.

    Args:
        settings: All sections of the run.
        device: Where this rank computes.
        total_steps: Optimizer steps of the run, over which the learning rates decay.

    Raises:
        ValueError: If no backend has this name, and for what the backend refuses.
    """
    name = settings.training.train_backend
    if name not in BACKENDS:
        raise ValueError(f"--train-backend {name}: unknown; choose from {', '.join(BACKENDS)}")
    return BACKENDS[name](settings, device, total_steps)
