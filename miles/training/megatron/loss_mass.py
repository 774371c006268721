"""The gradient of the loss-mass canary (objective/canary.py) after all of Megatron's reductions."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel

from miles.training.megatron.model.policy_model import PolicyModel
from miles.training.megatron.process_groups import Ranks


def take_mass(model: DistributedDataParallel, ranks: Ranks) -> float:
    """The canary's gradient on the one data-parallel rank of the last stage that has it whole, 0 elsewhere.

    It is cleared, so that neither norm nor optimizer sees it. Under a distributed optimizer the gradient buffer is
    reduced in equal parts, one a rank; the others' copies of a part are left unreduced.
    """
    policy: PolicyModel = model.module
    canary = policy.canary
    if canary is None:
        return 0.0
    gradient: torch.Tensor = canary.main_grad  # type: ignore[attr-defined]
    mass = float(gradient)
    gradient.zero_()
    return mass if ranks.dp.rank() == _owner(model, canary, ranks) else 0.0


def _owner(model: DistributedDataParallel, canary: torch.nn.Parameter, ranks: Ranks) -> int:
    if not model.ddp_config.use_distributed_optimizer:
        return 0
    for buffer in model.buffers:
        for bucket in buffer.buckets:
            if canary in bucket.params:
                start, _end = bucket.param_to_index[canary]
                return start // (bucket.grad_data.numel() // ranks.dp.size())
    raise AssertionError("every parameter has a bucket")
