"""AdamW over sharded parameters, its schedule, and clipping by the global norm."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from miles.arguments.optimizer import OptimizerArguments
from miles.metrics import Metric
from miles.training.learning_rate import learning_rate


class ShardedOptimizer:
    """fp32 AdamW on this rank's shards. Weight decay applies to matrices only, not to norms and biases."""

    def __init__(
        self, model: nn.Module, settings: OptimizerArguments, total_steps: int, rate_flag: str = "--lr"
    ) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=settings.lr,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
            fused=True,
        )
        self.settings = settings
        self.total_steps = total_steps
        self.steps_done = 0
        self.rate_flag = rate_flag
        self._parameters = parameters

    def step(self) -> dict[str, Metric]:
        """Clip, update and clear. Raises ``FloatingPointError``, weights untouched, if a gradient is not finite."""
        norm = self.gradient_norm()
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of optimizer step {self.steps_done} is {norm}; the weights were left as they were. "
                f"Lower {self.rate_flag} or set --clip-grad, and resume from the last checkpoint with --load"
            )
        clip = self.settings.clip_grad
        if clip > 0 and norm > clip:
            torch._foreach_mul_([_local(p.grad) for p in self._parameters if p.grad is not None], clip / norm)
        rate = learning_rate(self.steps_done, self.settings, self.total_steps)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.adam.zero_grad()
        self.steps_done += 1
        return {"grad_norm": Metric(norm), "lr": Metric(rate)}

    def skip(self) -> dict[str, Metric]:
        """Leave weights and schedule as they are (a step without a single loss token)."""
        self.adam.zero_grad()
        return {"skipped_steps": Metric(1.0)}

    def gradient_norm(self) -> float:
        """The 2-norm over all parameters and ranks."""
        gradients = [_local(p.grad) for p in self._parameters if p.grad is not None]
        square = torch.stack([g.float().square().sum() for g in gradients]).sum()
        dist.all_reduce(square)
        return math.sqrt(square.item()) if torch.isfinite(square) else float(square.item())

    def to(self, device: torch.device) -> None:
        """Move the moments to ``device``, as the parameters were moved; there are no gradients between steps."""
        for state in self.adam.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.to(device)

    def state(self) -> dict[str, Any]:
        """What the schedule needs to go on."""
        return {"steps_done": self.steps_done}


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
