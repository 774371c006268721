"""Tiny models, uneven batches and a backend on this rank for the checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tiny_llama import save_tiny_llama
from torch.distributed.tensor import DTensor

from miles.arguments.cluster import ClusterArguments
from miles.arguments.model import ModelArguments
from miles.arguments.optimizer import OptimizerArguments
from miles.arguments.parallel import ParallelArguments
from miles.arguments.rollout import RolloutArguments
from miles.arguments.settings import Settings
from miles.arguments.training import TrainingArguments
from miles.batching.convert import convert
from miles.batching.schedule import schedule_step
from miles.metrics import Metric
from miles.objective.settings import LossArguments
from miles.sample import Prompt, PromptGroup, Sample
from miles.train_batch import TrainBatch, TrainShard
from miles.training import scoring
from miles.training.fsdp.backend import FsdpBackend
from miles.training.trainer import Trainer

TEMPERATURE = 0.8
FIXED = TrainingArguments(micro_batch_size=2)
BUDGET = TrainingArguments(use_dynamic_batch_size=True, max_tokens_per_gpu=24, balance_data=True)
PLAIN = LossArguments()
CPU = torch.device("cpu")

# trajectories of each group: the response lengths of a trajectory's samples (prompts have 3 tokens)
UNEVEN = (((4,), (9, 2), (6,)), ((1,), (12,)), ((5,), (5,)))
EQUAL_REWARDS = 2  # the group whose samples have no advantage


@dataclass(frozen=True)
class Stage:
    """One rank, the number of ranks, and the folder of models that the ranks share."""

    folder: Path
    rank: int
    world: int

    def model(self, name: str) -> str:
        return str(self.folder / name)


def save_models(folder: Path) -> None:
    for name, tied in (("tied", True), ("untied", False)):
        save_tiny_llama(folder / name, tied)


def make_backend(
    stage: Stage, name: str = "untied", total_steps: int = 10, loss: LossArguments = PLAIN, **optimizer: Any
) -> FsdpBackend:
    settings = Settings(
        cluster=ClusterArguments(actor_num_gpus_per_node=stage.world),
        model=ModelArguments(hf_checkpoint=stage.model(name)),
        rollout=RolloutArguments(rollout_temperature=TEMPERATURE),
        loss=loss,
        optimizer=OptimizerArguments(**optimizer),
        training=TrainingArguments(global_batch_size=7),
    )
    return FsdpBackend(settings, CPU, total_steps)


def make_batch(loss: LossArguments, masked: bool = False, seed: int = 0) -> TrainBatch:
    """Make one step with the production converter. Masks have holes, and the first sample is fully masked."""
    rng = np.random.default_rng(seed)
    prompt_groups, trajectory_id = [], 0
    for g, rollouts in enumerate(UNEVEN):
        prompt = Prompt("", tuple(rng.integers(0, 64, 3).tolist()))
        group = PromptGroup(g, prompt)
        for responses in rollouts:
            reward = 1.0 if g == EQUAL_REWARDS else float(rng.normal())
            group.samples += [_sample(rng, prompt, g, trajectory_id, n, reward, masked) for n in responses]
            trajectory_id += 1
        group.samples[0].loss_mask = [0] * len(group.samples[0].response_ids) if g == 0 else group.samples[0].loss_mask
        prompt_groups.append(group)
    return convert(prompt_groups, loss=loss, global_batch_size=trajectory_id)[0]


def _sample(
    rng: np.random.Generator, prompt: Prompt, group: int, rollout: int, n: int, reward: float, masked: bool
) -> Sample:
    return Sample(
        prompt,
        group,
        rollout,
        response_ids=rng.integers(0, 64, n).tolist(),
        loss_mask=[0] * n if masked else [int(t % 4 != 2) for t in range(n)],
        rollout_log_probs=rng.normal(-4, 0.3, n).tolist(),
        reward=reward,
    )


def off_policy(batch: TrainBatch) -> TrainBatch:
    """Return the batch with old log-probs that differ from the current ones, so that ratios differ from 1."""
    rng = np.random.default_rng(1)
    return replace(batch, old_log_probs=[rng.normal(-4, 0.4, n).astype(np.float32) for n in batch.response_lengths])


def shard_of(
    stage: Stage, batch: TrainBatch, training: TrainingArguments, has_gradient: Sequence[bool] | None = None
) -> TrainShard:
    return schedule_step(batch, stage.world, training, ParallelArguments(), has_gradient)[stage.rank]


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    return {name: full(p.grad) for name, p in backend.policy.module.language_model.named_parameters()}


def weights(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    return {name: full(p) for name, p in backend.policy.module.language_model.named_parameters()}


def train(backend: FsdpBackend, shards: Sequence[TrainShard]) -> list[dict[str, Metric]]:
    """Run the production step with the loss of the backend's settings."""
    return Trainer(backend, backend.settings.loss, dist.get_world_size()).train(shards)


def log_probs(backend: FsdpBackend, shard: TrainShard, reference: bool = False) -> list[np.ndarray]:
    """Return the log-probs of policy or reference, computed by the production code."""
    model = backend.reference if reference else backend.policy
    assert model is not None
    return scoring.log_probs(backend, model, shard)
