"""Take an optimizer step on either backend: schedule the learning rate, and refuse a gradient that is not finite."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from miles.config.optimizer import OptimizerArguments
from miles.types.metrics import Metric


class ScheduledOptimizer(ABC):
    """Adam with a learning rate that follows ``--lr-decay-style``; a subclass has the framework's Adam."""

    adam: Any  # has ``param_groups``

    def __init__(self, settings: OptimizerArguments, total_steps: int, rate_flag: str = "--lr") -> None:
        """``total_steps`` are those that the rate decays over; ``rate_flag`` is the flag that an error names."""
        self.settings = settings
        self.total_steps = total_steps
        self.rate_flag = rate_flag
        self.steps_done = 0

    def step(self) -> dict[str, Metric]:
        """Clip, update and clear; returns ``grad_norm``, before clipping, and ``lr``.

        Raises:
            FloatingPointError: on every rank, with the weights untouched, if a gradient is not finite.
        """
        norm = self._gradient_norm()
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of optimizer step {self.steps_done} is {norm}; the weights were left as they were. "
                f"Lower {self.rate_flag} or set --clip-grad, and resume from the last checkpoint with --load"
            )
        rate = learning_rate(self.steps_done, self.settings, self.total_steps)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self._clip_and_update(norm)
        self._clear()
        self.steps_done += 1
        return {"grad_norm": Metric(norm), "lr": Metric(rate)}

    def skip(self) -> dict[str, Metric]:
        """Clear the gradients and leave weights and schedule unchanged (a step without a single loss token)."""
        self._clear()
        return {"skipped_steps": Metric(1.0)}

    def state(self) -> dict[str, Any]:
        """Return the state of the schedule for a checkpoint."""
        return {"steps_done": self.steps_done}

    @abstractmethod
    def _gradient_norm(self) -> float:
        """Return the 2-norm of the gradient over all parameters and ranks. Collective."""

    @abstractmethod
    def _clip_and_update(self, norm: float) -> None:
        """Scale a gradient whose ``norm`` is above ``--clip-grad`` down to it, and apply Adam."""

    @abstractmethod
    def _clear(self) -> None:
        """Forget the gradients."""


def _between(optimizer: OptimizerArguments, share: float) -> float:
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * share


# The rate after the warm-up, by --lr-decay-style, from the part of the decay that is done (0 to 1).
DECAYS: dict[str, Callable[[OptimizerArguments, float], float]] = {
    "constant": lambda optimizer, progress: optimizer.lr,
    "linear": lambda optimizer, progress: _between(optimizer, 1.0 - progress),
    "cosine": lambda optimizer, progress: _between(optimizer, 0.5 * (1.0 + math.cos(math.pi * progress))),
}


def learning_rate(step: int, optimizer: OptimizerArguments, total_steps: int) -> float:
    """Return the rate of optimizer step ``step`` (from 0): linear warm-up to ``lr``, then the decay to ``min_lr``.

    The decay ends at ``--lr-decay-iters`` (default ``total_steps``), and the rate stays at ``min_lr`` after it.
    """
    decay_steps, warmup = optimizer.decay_steps(total_steps), optimizer.warmup_steps(total_steps)
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, decay_steps - warmup))
    return DECAYS[optimizer.lr_decay_style](optimizer, progress)


# Have torch compute the same bits in every run: ``--deterministic-mode``.


# Read by cuBLAS and NCCL when they start: one workspace for each stream, and one order of a sum over ranks.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}


def be_deterministic() -> None:
    """Choose deterministic kernels, before the first of them runs; operations that have none raise ``RuntimeError``.

    Variables that the user has set in the environment stay.
    """
    import torch  # not at the top: the launcher imports this module

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
