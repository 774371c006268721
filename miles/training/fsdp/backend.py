"""The FSDP2 backend: ``TrainBackend`` for one rank, on CPU (gloo) or CUDA (NCCL)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from miles.config.lora import LoraArguments
from miles.config.settings import Settings
from miles.models.routers import Routers
from miles.training import checkpoint_files
from miles.training.adapter_folder import check_adapter
from miles.training.backend import PolicyScorer, TrainBackend, ValueScorer
from miles.training.checkpoint_files import saved_reference
from miles.training.checkpoint_io import StagedFiles, restore_random_state, write_random_state
from miles.training.fsdp import checkpoint
from miles.training.fsdp.adapter import add_adapter, merged_weights, names_on_disk, save_adapter
from miles.training.fsdp.checkpoint import as_on_disk
from miles.training.fsdp.models import Policy, ShardedModule, ValueModel, load_model, local_part, shard_model
from miles.training.fsdp.packing_check import check_layout, check_untested_model
from miles.training.fsdp.runner import FsdpBaseModel, FsdpModel, FsdpTrainedModel, ShardedOptimizer
from miles.training.scoring import check_can_follow, check_same_positions, follow, names_of_state
from miles.types.groups import ContextGroups
from miles.types.weights import WeightChunk, in_chunks


class FsdpModelBuilder:
    """Builds and shards the models of a rank. The process group must be initialized.

    It has all settings, as it reads most of them: model, training, parallel, rollout, loss, lora, optimizer, critic and
    cluster.
    """

    def __init__(self, settings: Settings, device: torch.device, total_steps: int) -> None:
        assert settings.model.hf_checkpoint is not None
        torch.manual_seed(settings.training.seed)
        self.device = device
        self.settings = settings
        self.total_steps = total_steps
        self.base = settings.model.hf_checkpoint
        self.compute_dtype = torch.bfloat16 if settings.training.bf16 else torch.float32
        self.mesh = init_device_mesh(device.type, (settings.cluster.world_size,))
        self.groups = ContextGroups(settings.dims)
        check_layout("--hf-checkpoint", self.base, settings.parallel)

    def policy(self) -> FsdpTrainedModel[PolicyScorer]:
        """Return the model that is trained, with its adapter if it has one."""
        lora = self.settings.lora
        dtype = self.compute_dtype if lora.trains_adapter else torch.float32  # weights that are updated need fp32
        policy = self._load_policy("--hf-checkpoint", self.base, dtype, lora)
        policy.train()
        steps = self.settings.policy_steps(self.total_steps)
        optimizer = ShardedOptimizer(policy.language_model, self.settings.optimizer, steps)
        model = FsdpTrainedModel(policy, optimizer, self.groups, self.device)
        if self.settings.rollout.use_rollout_routing_replay:
            policy.routers = Routers(policy.language_model, "--use-rollout-routing-replay")
        elif self.settings.training.use_routing_replay:
            policy.routers = Routers(policy.language_model, "--use-routing-replay")
            model.record_experts(policy.routers)
        return model

    def critic(self) -> FsdpTrainedModel[ValueScorer]:
        """Return the policy's decoder with one number per token."""
        model = ValueModel(cast(PreTrainedModel, self._read(self.base, torch.float32).base_model))
        self._shard(model)
        model.train()
        optimizer = ShardedOptimizer(model, self.settings.critic_optimizer, self.total_steps, rate_flag="--critic-lr")
        return FsdpTrainedModel(model, optimizer, self.groups, self.device)

    def reference(self, policy: FsdpTrainedModel[PolicyScorer]) -> FsdpModel[PolicyScorer]:
        """Return the model of ``--ref-load``, or the one that training starts from.

        Under an adapter that one is frozen already.
        """
        ref_load = self.settings.model.ref_load
        if ref_load is None and self.settings.lora.trains_adapter:
            return FsdpBaseModel(policy.module, self.groups, self.device)
        if self.settings.model.ref_update_interval is None:
            return self.frozen("--ref-load", ref_load)
        mixes = self.settings.model.ref_mixup_alpha < 1
        reference = self.frozen("--ref-load", ref_load, torch.float32 if mixes else self.compute_dtype)
        check_can_follow(_state(reference.module), _state(policy.module), ref_load)
        check_same_positions(reference.module.language_model.config, policy.module.language_model.config, ref_load)
        return reference

    def frozen(self, flag: str, path: str | None, dtype: torch.dtype | None = None) -> FsdpModel[PolicyScorer]:
        """Freeze a model: a Hugging Face folder, or a checkpoint of this backend; None is ``--hf-checkpoint``.

        ``dtype`` is the dtype in which weights are kept; by default, the one in which they are computed with.
        """
        dtype = dtype or self.compute_dtype
        folder = checkpoint_files.at(Path(path)) if path is not None else None
        if path is None or folder is not None:
            model = self._load_policy("--hf-checkpoint", self.base, dtype)
        else:
            check_layout(flag, path, self.settings.parallel)
            model = self._load_policy(flag, path, dtype)
        if folder is not None:
            self._read_frozen(folder, model, f"{flag} {path}")
        model.eval().requires_grad_(False)
        return FsdpModel(model, self.groups, self.device)

    def _load_policy(self, flag: str, path: str, dtype: torch.dtype, lora: LoraArguments | None = None) -> Policy:
        temperature, chunk_size = self.settings.rollout.rollout_temperature, self.settings.loss.log_probs_chunk_size
        policy = Policy(self._read(path, dtype), temperature, chunk_size, self.settings.training.fp32_lm_head)
        self._check(policy, flag, path)
        if policy.tower is not None and self.settings.training.freeze_vision_tower:
            policy.tower.freeze()
        if lora is not None and lora.trains_adapter:
            add_adapter(policy.language_model, lora, self.settings.training.seed)
        self._shard(policy)
        return policy

    def _shard(self, model: ShardedModule[Any]) -> None:
        shard_model(model, self.mesh, self.compute_dtype, self.settings.training.gradient_checkpointing)

    # What reads weights, or their values: a rehearsal has none (rehearsed.py).

    def _read(self, path: str, dtype: torch.dtype) -> PreTrainedModel:
        return load_model(path, dtype)

    def _read_frozen(self, folder: Path, model: Policy, name: str) -> None:
        check_adapter(folder, LoraArguments(), [], name)
        checkpoint.load_weights(folder, model.language_model, name)

    def _check(self, policy: Policy, flag: str, path: str) -> None:
        check_untested_model(policy, flag, path, self.settings.parallel, self.device)


class FsdpBackend:
    """One rank. The process group must be initialized.

    It has all settings, because the models that it builds read most of them, and so do their checkpoints.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        total_steps: int,
        builder: Callable[[Settings, torch.device, int], FsdpModelBuilder] = FsdpModelBuilder,
    ) -> None:
        build = builder(settings, device, total_steps)
        self.device = device
        self.settings = settings
        self.compute_dtype = build.compute_dtype
        self.token_group: dist.ProcessGroup | None = None
        self.policy = build.policy()
        self.critic = build.critic() if settings.loss.has_critic else None
        self.reference = build.reference(self.policy) if settings.loss.needs_reference else None
        self.teacher: FsdpModel[PolicyScorer] | None = None
        if settings.loss.teacher_is_loaded:
            self.teacher = build.frozen("--opd-teacher-load", settings.model.opd_teacher_load)

    def sum_over_ranks(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Add up in one collective."""
        packed = torch.stack([value.detach().float() for value in sums.values()])
        dist.all_reduce(packed)
        return dict(zip(sums, packed.tolist(), strict=True))

    def from_last_stage(self, columns: list[np.ndarray], lengths: Sequence[int]) -> list[np.ndarray]:
        """Return ``columns``: there are no pipeline stages."""
        assert len(columns) == len(lengths)
        return columns

    def export_weights(self) -> Iterator[WeightChunk]:
        """Yield the policy's weights in chunks: for servers as on disk, for the torch engine as in the model."""
        weights = self._full_weights()
        if self.settings.engine.has_servers:
            weights = as_on_disk(self.policy.module.language_model, weights)
        return in_chunks(weights)

    def _full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather parameter by parameter, in compute dtype; a tied head is the embedding, and yielded once."""
        for name, weight in merged_weights(self.policy.module.language_model, self.compute_dtype):
            yield name, weight.cpu()

    def offload(self) -> None:
        """Move models and optimizers to host memory."""
        self._move(torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move them back."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        for model in self.models():
            model.module.to(device)
            if isinstance(model, FsdpTrainedModel):
                model.optimizer.to(device)

    def models(self) -> list[FsdpModel[Any]]:
        """Return the models of this rank; a reference that is the policy without its adapter counts as the policy."""
        models = (self.policy, self.critic, self.reference, self.teacher)
        return list({id(model.module): model for model in reversed(models) if model is not None}.values())

    def refresh_reference(self) -> None:
        """Let the reference follow the policy."""
        assert self.reference is not None, "validate() demands a reference"
        reference = {name: local_part(weight) for name, weight in _state(self.reference.module).items()}
        policy = {
            # Weights that are updated are fp32, and gathered in compute dtype; buffers stay unchanged.
            name: local_part(weight).to(self.compute_dtype) if isinstance(weight, nn.Parameter) else weight
            for name, weight in _state(self.policy.module).items()
        }
        follow(reference, policy, self.settings.model.ref_mixup_alpha)

    def save(self, folder: Path, state: dict[str, Any], staged: StagedFiles | None = None) -> None:
        """Write the critic, if there is one, a reference that follows the policy, and the policy."""
        if self.critic is not None:
            within = checkpoint_files.critic_folder(folder)
            checkpoint.save_model(within, self.critic.module, self.critic.optimizer, {}, staged)
        if self.reference is not None and self.settings.model.ref_update_interval is not None:
            checkpoint.save_reference(folder, self.reference.module.language_model, staged)
        save_adapter(folder, self.policy.module.language_model, self.settings)
        checkpoint.save_model(folder, self.policy.module.language_model, self.policy.optimizer, state, staged)
        write_random_state(folder)
        dist.barrier()

    def load(self, folder: Path, optimizer: bool = True, rng: bool = True, reference: bool = True) -> dict[str, Any]:
        """Read what ``save`` wrote, on any number of ranks."""
        language_model = self.policy.module.language_model
        check_adapter(folder, self.settings.lora, names_on_disk(language_model), "--load")
        whole = checkpoint.load_model(folder, language_model, self.policy.optimizer, optimizer)
        state: dict[str, Any] = whole["launcher"]
        if rng:
            restore_random_state(folder)
        if self.critic is not None:
            within = checkpoint_files.saved_critic(folder)
            checkpoint.load_model(within, self.critic.module, self.critic.optimizer, optimizer)
        if not reference:
            return state
        saved = saved_reference(folder, self.settings.model.ref_update_interval, self.reference is not None)
        if saved is not None:
            assert self.reference is not None, "validate() demands a reference"
            checkpoint.load_reference(saved, self.reference.module.language_model)
        return state

    def export_hf(self, folder: Path) -> None:
        """Write weights (in compute dtype), config and generation config as transformers would. Rank 0 writes."""
        checkpoint.export_hf(folder, self.policy.module.language_model, self._full_weights(), self.compute_dtype)
        save_adapter(folder, self.policy.module.language_model, self.settings)


def _state(policy: ShardedModule[PolicyScorer]) -> dict[str, torch.Tensor]:
    return dict(names_of_state(policy.language_model))


def build(settings: Settings, device: torch.device, total_steps: int) -> TrainBackend:
    """Build the backend of this rank."""
    return FsdpBackend(settings, device, total_steps)
