"""AdamW over sharded parameters, and clipping by the global norm."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from miles.config.optimizer import OptimizerArguments
from miles.training.optimizer import ScheduledOptimizer


class ShardedOptimizer(ScheduledOptimizer):
    """fp32 AdamW on this rank's shards. Weight decay applies to matrices only, not to norms and biases."""

    def __init__(
        self, model: nn.Module, settings: OptimizerArguments, total_steps: int, rate_flag: str = "--lr"
    ) -> None:
        super().__init__(settings, total_steps, rate_flag)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        decayed = {name: p for name, p in named.items() if _is_matrix(name, p)}
        others = {name: p for name, p in named.items() if name not in decayed}
        groups = [
            {"params": [*decayed.values()], "weight_decay": settings.weight_decay},
            {"params": [*others.values()], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=settings.lr,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
            fused=True,
        )
        self._parameters = [*named.values()]

    def to(self, device: torch.device) -> None:
        """Move the moments to ``device``, as the parameters were moved; there are no gradients between steps."""
        for state in self.adam.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.to(device)

    def _gradient_norm(self) -> float:
        gradients = [_local(p.grad) for p in self._parameters if p.grad is not None]
        square = torch.stack([g.float().square().sum() for g in gradients]).sum()
        dist.all_reduce(square)
        return math.sqrt(square.item()) if torch.isfinite(square) else float(square.item())

    def _clip_and_update(self, norm: float) -> None:
        clip = self.settings.clip_grad
        if clip > 0 and norm > clip:
            torch._foreach_mul_([_local(p.grad) for p in self._parameters if p.grad is not None], clip / norm)
        self.adam.step()

    def _clear(self) -> None:
        self.adam.zero_grad()


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix. In gpt_oss the biases of a layer's experts are the rows of one tensor."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
