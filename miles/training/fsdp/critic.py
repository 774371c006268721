"""The critic of the FSDP backend: beside the policy on the same ranks, sharded in the same way."""

from __future__ import annotations

import numpy as np
import torch

from miles.metrics import Metric
from miles.objective.settings import LossArguments
from miles.parallel.groups import ContextGroups
from miles.train_batch import TrainShard
from miles.training.fsdp.optimizer import ShardedOptimizer
from miles.training.fsdp.policy import ValueModel
from miles.training.fsdp.runner import forward_backward, values_of


class FsdpCritic:
    """``Critic`` (training/backend.py) for one rank. ``model`` is sharded already."""

    def __init__(
        self,
        model: ValueModel,
        optimizer: ShardedOptimizer,
        loss: LossArguments,
        groups: ContextGroups,
        device: torch.device,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.groups = groups
        self.device = device

    def values(self, shard: TrainShard) -> list[np.ndarray]:
        return values_of(self.model, shard, self.groups, self.device)

    def forward_backward(self, shard: TrainShard) -> dict[str, Metric]:
        return forward_backward(self.model, shard, self.loss, self.groups, self.device)

    def optimizer_step(self) -> dict[str, Metric]:
        return self.optimizer.step()

    def skip_step(self) -> dict[str, Metric]:
        return self.optimizer.skip()
