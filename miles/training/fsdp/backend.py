"""The FSDP2 backend: ``TrainBackend`` for one rank, on CPU (gloo) or CUDA (NCCL)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from miles.arguments.settings import Settings
from miles.metrics import Metric
from miles.parallel.groups import ContextGroups
from miles.train_batch import TrainShard
from miles.training import checkpoint_folder
from miles.training.fsdp import checkpoint
from miles.training.fsdp.critic import FsdpCritic
from miles.training.fsdp.optimizer import ShardedOptimizer
from miles.training.fsdp.policy import Policy, load_policy, load_value_model, shard_policy
from miles.training.fsdp.runner import forward_backward, log_probs_of
from miles.weights import WeightChunk, in_chunks


class FsdpBackend:
    """One rank. The process group must be initialized; every verb is collective (training/backend.py)."""

    def __init__(self, settings: Settings, device: torch.device, total_steps: int) -> None:
        assert settings.model.hf_checkpoint is not None
        torch.manual_seed(settings.training.seed)
        self.device = device
        self.settings = settings
        self.compute_dtype = torch.bfloat16 if settings.training.bf16 else torch.float32
        self.mesh = init_device_mesh(device.type, (settings.cluster.world_size,))
        self.groups = ContextGroups(settings.dims)
        self.policy = self._build(settings.model.hf_checkpoint, torch.float32)
        self.policy.train()
        self.optimizer = ShardedOptimizer(
            self.policy.language_model, settings.optimizer, settings.policy_steps(total_steps)
        )
        self.token_group: dist.ProcessGroup | None = None
        self.critic = self._build_critic(total_steps) if settings.loss.has_critic else None
        self.reference: Policy | None = None
        if settings.loss.needs_reference:
            self.reference = self._reference(settings.model.hf_checkpoint, settings.model.ref_load)

    def _build(self, path: str, dtype: torch.dtype) -> Policy:
        policy = load_policy(
            path, self.settings.rollout.rollout_temperature, self.settings.loss.log_probs_chunk_size, dtype
        )
        policy.to(self.device)
        shard_policy(policy, self.mesh, self.compute_dtype, self.settings.training.gradient_checkpointing)
        return policy

    def _build_critic(self, total_steps: int) -> FsdpCritic:
        assert self.settings.model.hf_checkpoint is not None
        model = load_value_model(self.settings.model.hf_checkpoint, torch.float32).to(self.device)
        shard_policy(model, self.mesh, self.compute_dtype, self.settings.training.gradient_checkpointing)
        model.train()
        optimizer = ShardedOptimizer(model, self.settings.critic_optimizer, total_steps, rate_flag="--critic-lr")
        return FsdpCritic(model, optimizer, self.settings.loss, self.groups, self.device)

    def _reference(self, hf_checkpoint: str, ref_load: str | None) -> Policy:
        """A frozen model with the weights of ``--ref-load``: a Hugging Face folder, or a checkpoint of this backend."""
        folder = checkpoint_folder.at(Path(ref_load)) if ref_load is not None else None
        path = hf_checkpoint if folder is not None else ref_load or hf_checkpoint
        reference = self._build(path, self.compute_dtype)
        if folder is not None:
            checkpoint.load_weights(folder, reference.language_model, f"--ref-load {ref_load}")
        reference.eval().requires_grad_(False)
        return reference

    def forward_backward(self, shard: TrainShard) -> dict[str, Metric]:
        return forward_backward(self.policy, shard, self.settings.loss, self.groups, self.device)

    def optimizer_step(self) -> dict[str, Metric]:
        return self.optimizer.step()

    def skip_step(self) -> dict[str, Metric]:
        return self.optimizer.skip()

    def log_probs(self, shard: TrainShard, reference: bool = False) -> list[np.ndarray]:
        policy = self.reference if reference else self.policy
        assert policy is not None, "reference log-probs need --use-kl-loss or --kl-coef"
        return log_probs_of(policy, shard, self.groups, self.device)

    def export_weights(self) -> Iterator[WeightChunk]:
        return in_chunks(self._full_weights())

    def _full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather one parameter at a time, in compute dtype; a tied head is the embedding and comes once."""
        for name, parameter in self.policy.language_model.named_parameters():
            shard = parameter.detach()
            shard = shard.to(self.compute_dtype)
            full = shard.full_tensor() if isinstance(shard, DTensor) else shard
            yield name, full.cpu()

    def offload(self) -> None:
        self._move(torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        self.policy.to(device)
        if self.reference is not None:
            self.reference.to(device)
        if self.critic is not None:
            self.critic.model.to(device)
            self.critic.optimizer.to(device)
        self.optimizer.to(device)

    def save(self, folder: Path, state: dict[str, Any]) -> None:
        if self.critic is not None:
            checkpoint.save_critic(folder, self.critic.model, self.critic.optimizer)
        checkpoint.save(folder, self.policy.language_model, self.optimizer, state)

    def load(self, folder: Path, optimizer: bool = True, rng: bool = True) -> dict[str, Any]:
        state = checkpoint.load(folder, self.policy.language_model, self.optimizer, optimizer, rng)
        if self.critic is not None:
            checkpoint.load_critic(folder, self.critic.model, self.critic.optimizer, optimizer)
        return state

    def export_hf(self, folder: Path) -> None:
        """Write weights (in compute dtype), config and generation config as transformers would. Rank 0 writes."""
        checkpoint.export_hf(folder, self.policy.language_model, self._full_weights(), self.compute_dtype)
