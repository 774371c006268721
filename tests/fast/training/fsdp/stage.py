"""Tiny models, uneven batches and a backend on this rank for the checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from batches import batch_of
from cases import ANYWHERE, TEMPERATURE, Case, Mask, Spec, without_loss_tokens
from tiny_kinds import CONFIGS
from tiny_llama import SHAPE, save_tiny_llama
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM

from miles.batch.schedule import schedule_step
from miles.config.cluster import ClusterArguments
from miles.config.model import ModelArguments
from miles.config.optimizer import OptimizerArguments
from miles.config.parallel import ParallelArguments
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.config.training import TrainingArguments
from miles.objective.settings import LossArguments
from miles.training import scoring
from miles.training.fsdp.backend import FsdpBackend
from miles.training.trainer import Trainer
from miles.types.metrics import Metric
from miles.types.train_batch import TrainBatch, TrainShard

PLAIN = LossArguments()
PACKED, PADDED = ParallelArguments(), ParallelArguments(qkv_format="bshd")
CPU = torch.device("cpu")

EXPERTS = dict(num_experts=4, num_experts_per_tok=2)
SIGMOID = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1)


def with_masked(*lengths: int) -> tuple[Mask, ...]:
    return tuple(tuple(int(t % 4 != 2) for t in range(n)) for n in lengths)


UNEVEN: Spec = (
    (((0,) * 4,), with_masked(9, 2), with_masked(6)),
    (with_masked(1), with_masked(12)),
    (with_masked(5), with_masked(5)),
)


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
    kinds = (
        ("recurrent", "qwen3_next", CONFIGS["qwen3_next"]),
        ("sparse", "glm_moe_dsa", CONFIGS["glm_moe_dsa"]),
        ("windowed", "gpt_oss", CONFIGS["gpt_oss"]),
        ("untested", "jamba", EXPERTS),
        ("sigmoid", "glm4_moe", SIGMOID),
    )
    for name, kind, fields in kinds:
        torch.manual_seed(7)
        config = AutoConfig.for_model(kind, **(SHAPE | dict(initializer_range=0.15) | fields))
        model = AutoModelForCausalLM.from_config(config)
        if name == "sigmoid":
            model.model.layers[1].mlp.gate.e_score_correction_bias.normal_()
        model.save_pretrained(folder / name)


def make_backend(
    stage: Stage,
    name: str = "untied",
    total_steps: int = 10,
    loss: LossArguments = PLAIN,
    parallel: ParallelArguments = PACKED,
    **optimizer: Any,
) -> FsdpBackend:
    settings = Settings(
        cluster=ClusterArguments(actor_num_gpus_per_node=stage.world),
        model=ModelArguments(hf_checkpoint=stage.model(name)),
        rollout=RolloutArguments(rollout_temperature=TEMPERATURE),
        loss=loss,
        optimizer=OptimizerArguments(**optimizer),
        training=TrainingArguments(global_batch_size=7),
        parallel=parallel,
    )
    return FsdpBackend(settings, CPU, total_steps)


def make_batch(loss: LossArguments, masked: bool = False, seed: int = 0) -> TrainBatch:
    """Make one step with the production converter. Masks have zeros inside, and the first sample is fully masked."""
    spec = without_loss_tokens(UNEVEN) if masked else UNEVEN
    return batch_of(Case(spec, loss, ANYWHERE, seed=seed, equal_rewards=True, equal_group=2))


def off_policy(batch: TrainBatch) -> TrainBatch:
    """Return the batch with old log-probs that differ from the current ones, so that ratios differ from 1."""
    rng = np.random.default_rng(1)
    return replace(batch, old_log_probs=[rng.normal(-4, 0.4, n).astype(np.float32) for n in batch.response_lengths])


def shard_of(
    stage: Stage,
    batch: TrainBatch,
    training: TrainingArguments,
    has_gradient: Sequence[bool] | None = None,
    parallel: ParallelArguments = PACKED,
) -> TrainShard:
    return schedule_step(batch, stage.world, training, parallel, has_gradient)[stage.rank]


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def all_full(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``full`` of each, gathered in one exchange: one for each would take longer than a step."""
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    assert all(tensor.placements == (Shard(0),) for tensor in sharded.values())
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {name: tensor.to_local().detach() for name, tensor in sharded.items()})
    whole = {name: torch.cat([part[name] for part in parts]) for name in sharded}
    return {name: whole[name] if name in whole else full(tensor) for name, tensor in tensors.items()}


def gradients(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    """Return the policy's gradients; every parameter has one."""
    named = dict(backend.policy.module.language_model.named_parameters())
    tensors = {name: p.grad for name, p in named.items() if p.grad is not None}
    assert tensors.keys() == named.keys()
    return all_full(tensors)


def weights(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    return all_full(dict(backend.policy.module.language_model.named_parameters()))


def train(backend: FsdpBackend, shards: Sequence[TrainShard]) -> list[dict[str, Metric]]:
    """Run the production step with the loss of the backend's settings."""
    return Trainer(backend, backend.settings.loss, dist.get_world_size()).train(shards)


def log_probs(backend: FsdpBackend, shard: TrainShard, reference: bool = False) -> list[np.ndarray]:
    """Return the log-probs of policy or reference, computed by the production code."""
    model = backend.reference if reference else backend.policy
    assert model is not None
    return scoring.log_probs(backend, model, shard)
