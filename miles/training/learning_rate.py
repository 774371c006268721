"""The learning rate as a function of the optimizer step."""

from __future__ import annotations

import math

from miles.arguments.optimizer import OptimizerArguments


def learning_rate(step: int, optimizer: OptimizerArguments, total_steps: int) -> float:
    """Rate of optimizer step ``step`` (from 0): linear warm-up to ``lr``, then the decay to ``min_lr``.

    The decay ends at ``--lr-decay-iters`` (default ``total_steps``) and the rate stays at ``min_lr`` from there.
    """
    decay_steps = optimizer.lr_decay_iters or total_steps
    warmup = optimizer.lr_warmup_iters
    if optimizer.lr_warmup_fraction is not None:
        warmup = round(optimizer.lr_warmup_fraction * decay_steps)
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    if optimizer.lr_decay_style == "constant":
        return optimizer.lr
    progress = min(1.0, (step - warmup) / max(1, decay_steps - warmup))
    share = 1.0 - progress if optimizer.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * share
