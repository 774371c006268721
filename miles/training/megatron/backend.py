"""The Megatron backend: ``TrainBackend`` for one rank, on CPU (gloo) or CUDA (NCCL).

On CPU, ``cpu_support.support_cpu`` comes before this module is imported.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from transformers import PretrainedConfig

import miles.training.megatron.checkpoint as checkpoint
import miles.training.megatron.runner as runner
from miles.base.flags import collect_errors
from miles.config.lora import LoraArguments, check_adapter_with_model
from miles.config.megatron.rules import check_same_shape, check_with_model
from miles.config.settings import Settings
from miles.models.base import HEADS_IN_CONFIG, is_of_head
from miles.models.reading import read_config
from miles.training import checkpoint_files
from miles.training.adapter_folder import check_adapter, write_adapter
from miles.training.backend import PolicyScorer, ValueScorer
from miles.training.checkpoint_files import critic_folder, reference_folder, saved_critic, saved_reference
from miles.training.checkpoint_io import StagedFiles
from miles.training.megatron.hf_files import HuggingFaceWeights, export_hf
from miles.training.megatron.model.adapter import Adapter
from miles.training.megatron.model.transformer_config import ddp_config, optimizer_config, transformer_config
from miles.training.megatron.moe import expert_biases
from miles.training.megatron.policy_model import PolicyModel, ValueStage
from miles.training.megatron.process_groups import Ranks, initialize_process_groups
from miles.training.megatron.versions import megatron_version
from miles.training.megatron.weights import WeightConverter, build_converter
from miles.training.scoring import check_can_follow, check_same_positions, follow
from miles.types.weights import WeightChunk, in_chunks


class MegatronModelBuilder:
    """Builds the models of a rank. The process group must be initialized.

    It has all settings, as it reads most of them: model, training, megatron, rollout, loss, lora, optimizer, critic,
    cluster and parallel.
    """

    def __init__(self, settings: Settings, device: torch.device, total_steps: int) -> None:
        assert settings.model.hf_checkpoint is not None
        megatron_version()
        self.device = device
        self.settings = settings
        self.total_steps = total_steps
        self.compute_dtype = torch.bfloat16 if settings.training.bf16 else torch.float32
        self.ranks = initialize_process_groups(settings.dims, settings.training.seed)
        self.hf_config = read_config(settings.model.hf_checkpoint)
        self.hf_weights = self._weights_at("--hf-checkpoint", settings.model.hf_checkpoint)
        self.converter = build_converter(
            settings.megatron.megatron_to_hf_mode, self.hf_config, self.hf_weights, self.ranks
        )
        config, shape = self.hf_config.to_dict(), self.converter.shape
        with collect_errors() as errors:
            check_with_model(settings.megatron, settings.megatron_overrides, config, shape, errors)

    def policy(self) -> runner.MegatronTrainedModel[PolicyScorer]:
        """Return the model that is trained, with its adapter if it has one."""
        model = self.load(self.hf_config, self.hf_weights, is_trained=True)
        if self.settings.lora.trains_adapter:
            self._add_adapter(model)
        models = self._distributed(model)
        config = optimizer_config(self.settings.optimizer, self.settings.megatron, self.compute_dtype, self.device)
        steps = self.settings.policy_steps(self.total_steps)
        optimizer = runner.MegatronOptimizer(models, config, self.settings.optimizer, steps)
        sizes = self.settings.megatron
        policy = runner.MegatronTrainedModel[PolicyScorer](models, optimizer, sizes, self.ranks, self.device)
        policy.replays_experts = self.settings.rollout.use_rollout_routing_replay
        policy.records_experts = self.settings.training.use_routing_replay and not policy.replays_experts
        return policy

    def critic(self) -> runner.MegatronTrainedModel[ValueScorer]:
        """Return the policy's decoder with one number per token."""
        models = self._distributed(self.load(self.hf_config, self.hf_weights, of=ValueStage))
        arguments = self.settings.critic_optimizer
        config = optimizer_config(arguments, self.settings.megatron, self.compute_dtype, self.device)
        optimizer = runner.MegatronOptimizer(models, config, arguments, self.total_steps, rate_flag="--critic-lr")
        return runner.MegatronTrainedModel(models, optimizer, self.settings.megatron, self.ranks, self.device)

    def reference(self, policy: runner.MegatronTrainedModel[PolicyScorer]) -> runner.MegatronModel[PolicyScorer]:
        """Return the model of ``--ref-load``, or the one that training starts from.

        Under an adapter that one is frozen already.
        """
        ref_load = self.settings.model.ref_load
        if ref_load is None and self.settings.lora.trains_adapter:
            return runner.MegatronBaseModel(policy.stage, self.ranks, self.device)
        return self.frozen("--ref-load", ref_load)

    def frozen(self, flag: str, path: str | None) -> runner.MegatronModel[PolicyScorer]:
        """Freeze a model: a Hugging Face folder, or a checkpoint of this backend; None is ``--hf-checkpoint``."""
        folder = checkpoint_files.at(Path(path)) if path is not None else None
        hf_config, weights = self.hf_config, self.hf_weights
        if path is not None and folder is None:
            hf_config, weights = read_config(path), self._weights_at(flag, path)
            other = (hf_config.to_dict(), self.converter.shape_of(hf_config))
            policy = (self.hf_config.to_dict(), self.converter.shape)
            with collect_errors() as errors:
                check_same_shape(flag[2:].replace("-", "_"), path, other, policy, errors)
            if flag == "--ref-load" and self.settings.model.ref_update_interval is not None:
                check_same_positions(hf_config, self.hf_config, path)
        model = self.load(hf_config, weights)
        if folder is not None:
            self._read_frozen(folder, model, f"{flag} {path}")
        for chunk in model.chunks:
            chunk.eval().requires_grad_(False)
        return runner.MegatronModel(model, self.ranks, self.device)

    def load(
        self,
        hf_config: PretrainedConfig,
        weights: HuggingFaceWeights | None,
        is_trained: bool = False,
        of: type[PolicyModel] = PolicyModel,
    ) -> PolicyModel:
        """Build this rank's part of a model, and fill it with ``weights``; None leaves it without values."""
        config = transformer_config(
            self.settings.megatron,
            self.settings.megatron_overrides,
            self.converter.shape,
            self.compute_dtype,
            gradient_checkpointing=self.settings.training.gradient_checkpointing,
            per_token_loss=self.settings.loss.calculate_per_token_loss,
            deterministic=self.settings.training.deterministic_mode,
        )
        config.mtp_num_layers = self.settings.megatron.mtp_num_layers if is_trained else None
        policy: PolicyModel = of.build_chunks(
            config,
            hf_config,
            self.ranks,
            self.settings.rollout.rollout_temperature,
            self.settings.loss.log_probs_chunk_size,
            is_trained and self.settings.loss.loss_canary != "off",
            self.settings.training.fp32_lm_head,
        )
        for chunk in policy.chunks:
            chunk.to(self.device)  # before it is filled: ranks may send each other parts
        if weights is not None:
            self._fill(policy, weights)
        return policy

    # What reads weights: a rehearsal has none (rehearsed.py).

    def _weights_at(self, flag: str, path: str) -> HuggingFaceWeights:
        return HuggingFaceWeights(path, flag)

    def _fill(self, policy: PolicyModel, weights: HuggingFaceWeights) -> None:
        self.converter.load(policy, weights)

    def _add_adapter(self, policy: PolicyModel) -> None:
        adapter = add_adapter(policy, self.converter, self.settings.lora, self.hf_config.model_type, self.ranks)
        adapter.draw(self.settings.training.seed)

    def _read_frozen(self, folder: Path, model: PolicyModel, name: str) -> None:
        check_adapter(folder, LoraArguments(), [], name)
        checkpoint.load_weights(folder, model, self.ranks, name)

    def _distributed(self, policy: PolicyModel) -> list[DistributedDataParallel]:
        """Wrap the chunks of a model with gradient buffers, which are reduced when the schedule ends."""
        config = ddp_config(self.settings.megatron, self.settings.megatron_overrides)
        models = [
            DistributedDataParallel(policy.config, config, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(policy.chunks)
        ]
        for model in models:
            model.train()
        policy.config.finalize_model_grads_func = finalize_model_grads
        if models[0].ddp_config.overlap_grad_reduce:
            policy.config.no_sync_func = [model.no_sync for model in models] if len(models) > 1 else models[0].no_sync
        return models


class MegatronBackend:
    """One rank. The process group must be initialized.

    It has all settings, because the models that it builds read most of them, and so do their checkpoints.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        total_steps: int,
        builder: type[MegatronModelBuilder] = MegatronModelBuilder,
    ) -> None:
        build = builder(settings, device, total_steps)
        self.device = device
        self.settings = settings
        self.compute_dtype = build.compute_dtype
        self.ranks = build.ranks
        self.token_group: dist.ProcessGroup | None = self.ranks.token_group
        self.hf_config = build.hf_config
        self.generation_config = build.hf_weights.generation_config()  # now: the hub may not be there when the run ends
        self.converter = build.converter
        self._host_copies = runner.HostCopies()
        self.policy = build.policy()
        self.critic = build.critic() if settings.loss.has_critic else None
        if settings.checkpoint.save is not None:
            for trained in self.trained():
                checkpoint.check_can_save(trained.stage, self.ranks)
        self.reference = build.reference(self.policy) if settings.loss.needs_reference else None
        self.following: FollowingReference | None = None  # the reference, if it follows the policy
        if self.reference is not None and settings.model.ref_update_interval is not None:
            self.following = FollowingReference(self.reference.stage, self.ranks, settings.model.ref_mixup_alpha)
            self.following.check(self.policy.stage, settings.model.ref_load)
        self.teacher: runner.MegatronModel[PolicyScorer] | None = None
        if settings.loss.teacher_is_loaded:
            self.teacher = build.frozen("--opd-teacher-load", settings.model.opd_teacher_load)

    def trained(self) -> list[runner.MegatronTrainedModel[Any]]:
        """Return the models that learn."""
        return [model for model in (self.policy, self.critic) if model is not None]

    def models(self) -> list[runner.MegatronModel[Any]]:
        """Return all models of this rank."""
        return [*self.trained(), *(model for model in (self.reference, self.teacher) if model is not None)]

    def sum_over_ranks(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Add up over the ranks of the last stage, which send names and sums to the others."""
        names = [list(sums)]
        dist.broadcast_object_list(names, self.ranks.last_stage, group=self.ranks.pp)
        packed = torch.zeros(len(names[0]), device=self.device)
        if self.ranks.is_last_stage:
            packed = torch.stack([value.detach().float() for value in sums.values()])
            dist.all_reduce(packed, group=self.ranks.token_group)
        dist.broadcast(packed, self.ranks.last_stage, group=self.ranks.pp)
        return dict(zip(names[0], packed.tolist(), strict=True))

    def from_last_stage(self, columns: list[np.ndarray], lengths: Sequence[int]) -> list[np.ndarray]:
        """Send the last stage's ``columns`` through the pipeline, end to end."""
        if self.ranks.pp.size() == 1:
            return columns
        flat = torch.zeros(sum(lengths), device=self.device)
        if self.ranks.is_last_stage and lengths:
            flat.copy_(torch.from_numpy(np.concatenate(columns)))
        dist.broadcast(flat, self.ranks.last_stage, group=self.ranks.pp)
        return [part.numpy() for part in flat.cpu().split(list(lengths))]

    def export_weights(self) -> Iterator[WeightChunk]:
        """Yield the policy's weights in chunks."""
        # The engine's model has no heads of multi-token prediction.
        return in_chunks((name, tensor) for name, tensor in self._full_weights() if not is_of_head(name))

    def _full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        exported = self.converter.export(self.policy.stage, exported_value(self.policy.stage), self.compute_dtype)
        return ((name, tensor.cpu()) for name, tensor in exported)

    def offload(self) -> None:
        """Move models and optimizers to host memory."""
        held: list[torch.Tensor] = [] if self.following is None else list(self.following.exact.values())
        for model in self.models():
            held += runner.model_state(model.stage.chunks)
        for model in self.trained():
            held += runner.optimizer_state(model.optimizer.adam)
        zeros = [gradient for model in self.trained() for gradient in runner.gradients(model.distributed)]
        self._host_copies.take(held, zeros, self.device)
        runner.free_buffers_of_layers()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move them back."""
        self._host_copies.give_back()

    def refresh_reference(self) -> None:
        """Let the reference follow the policy."""
        assert self.following is not None, "validate() demands a reference"
        self.following.follow(self.policy.stage)

    def save(self, folder: Path, state: dict[str, Any], staged: StagedFiles | None = None) -> None:
        """Write the policy, the critic if there is one, and a reference that follows the policy."""
        checkpoint.save(folder, self.policy, state, staged)
        save_adapter(folder, self.policy.stage, self.settings, self.ranks)
        if self.critic is not None:
            within = critic_folder(folder)
            within.mkdir(exist_ok=True)
            checkpoint.save(within, self.critic, {}, staged)
        if self.following is not None:
            within = reference_folder(folder)
            within.mkdir(exist_ok=True)
            self.following.save(within, staged)

    def load(self, folder: Path, optimizer: bool = True, rng: bool = True, reference: bool = True) -> dict[str, Any]:
        """Read what ``save`` wrote, under any layout."""
        adapter = self.policy.stage.adapter
        check_adapter(folder, self.settings.lora, [] if adapter is None else adapter.names, "--load")
        state = checkpoint.load(folder, self.policy, optimizer, rng)
        if self.critic is not None:
            checkpoint.load(saved_critic(folder), self.critic, optimizer, rng=False)
        if not reference:
            return state
        saved = saved_reference(folder, self.settings.model.ref_update_interval, self.reference is not None)
        if saved is not None:
            assert self.following is not None, "validate() demands a reference"
            self.following.load(saved)
        return state

    def export_hf(self, folder: Path) -> None:
        """Write weights (in compute dtype), config and generation config as transformers would. Rank 0 writes."""
        export_hf(
            folder,
            self.hf_config,
            self.generation_config,
            self._full_weights(),
            self.compute_dtype,
            {HEADS_IN_CONFIG: self.settings.megatron.mtp_heads},
        )
        save_adapter(folder, self.policy.stage, self.settings, self.ranks)


# The reference model on Megatron under ``--ref-update-interval`` (training/scoring.py has the formula).


class FollowingReference:
    """The weights of one rank's reference, which follow the policy. ``exact`` are in fp32 if they are mixed."""

    def __init__(self, stage: PolicyModel, ranks: Ranks, alpha: float) -> None:
        self._stage = stage
        self._ranks = ranks
        self._alpha = alpha
        self._weights = named_weights(stage)
        self.exact = {name: w.detach() if alpha == 1 else w.detach().float() for name, w in self._weights.items()}
        self._exact_of = {id(weight): self.exact[name] for name, weight in self._weights.items()}

    def check(self, policy: PolicyModel, path: str | None) -> None:
        """Raise ``ValueError`` if the reference at ``path`` has other weights than ``policy``."""
        # The policy alone has heads of multi-token prediction.
        of_policy = {name: w for name, w in named_weights(policy).items() if not name.startswith("mtp.")}
        check_can_follow(self._weights, of_policy, path)

    def follow(self, policy: PolicyModel) -> None:
        """Copy the weights of ``policy``, or mix them in."""
        follow(self.exact, named_weights(policy), self._alpha)
        self._compute_with_exact()

    def save(self, folder: Path, staged: StagedFiles | None = None) -> None:
        """Write the weights into ``folder``, which is empty, or into ``staged``. Collective."""
        checkpoint.save_weights(folder, self._stage, self._ranks, lambda weight: self._exact_of[id(weight)], staged)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read what ``save`` wrote, under any layout. Collective."""
        for weight, whole in checkpoint.read_weights(folder, self._stage, self._ranks, "--load"):
            self._exact_of[id(weight)].copy_(whole)
        self._compute_with_exact()

    @torch.no_grad()
    def _compute_with_exact(self) -> None:
        for name, weight in self._weights.items():
            weight.copy_(self.exact[name])  # itself, unless weights are mixed


def named_weights(stage: PolicyModel) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors of a rank's chunks: parameters without the canary, and biases of experts."""
    weights: dict[str, torch.Tensor] = {}
    for number, chunk in enumerate(stage.chunks, start=1):
        of_part = f" of part {number}" if len(stage.chunks) > 1 else ""
        named = dict(chunk.named_parameters()) | dict(expert_biases(chunk))
        weights |= {name + of_part: weight for name, weight in named.items() if weight is not chunk.canary}
    return weights


# Export the weights of a checkpoint in one process.


def export(settings: Settings, checkpoint_folder: Path, folder: Path) -> None:
    """Write the weights of ``checkpoint_folder`` into ``folder`` as ``MegatronBackend.export_hf`` would. One rank."""
    build = MegatronModelBuilder(settings, torch.device("cpu"), total_steps=1)
    has_adapter = settings.lora.trains_adapter
    policy = build.load(build.hf_config, build.hf_weights if has_adapter else None, is_trained=True)
    names: list[str] = []
    if has_adapter:
        names = add_adapter(policy, build.converter, settings.lora, build.hf_config.model_type, build.ranks).names
    check_adapter(checkpoint_folder, settings.lora, names, str(checkpoint_folder))
    checkpoint.load_weights(checkpoint_folder, policy, build.ranks, str(checkpoint_folder))
    weights = build.converter.export(policy, exported_value(policy), build.compute_dtype)
    heads = {HEADS_IN_CONFIG: settings.megatron.mtp_heads}
    export_hf(folder, build.hf_config, build.hf_weights.generation_config(), weights, build.compute_dtype, heads)
    save_adapter(folder, policy, settings, build.ranks)


# The adapter of a Megatron model (model/adapter.py): put into its layers, exported, and written for peft.


def add_adapter(
    policy: PolicyModel, converter: WeightConverter, lora: LoraArguments, model_type: str, ranks: Ranks
) -> Adapter:
    """Put a new adapter of 0 into the chosen layers of ``policy``, and freeze everything else. Collective.

    Raises:
        ValueError: A name of ``--target-modules`` is no linear layer of the model, or it cannot have an adapter.
    """
    with collect_errors() as errors:  # of a model on a hub, whose config the validator has not read
        check_adapter_with_model(lora, model_type, converter.shape, errors)
    adapter = policy.add_adapter(converter.linear_layers, lora)
    adapter.gather_places(ranks.pp)
    return adapter


def exported_value(policy: PolicyModel) -> Callable[[torch.nn.Parameter], torch.Tensor]:
    """Return the exported tensor of a parameter: its data, with its adapter added."""
    return (lambda parameter: parameter.data) if policy.adapter is None else policy.adapter.merged


def save_adapter(folder: Path, policy: PolicyModel, settings: Settings, ranks: Ranks) -> None:
    """Write the adapter, if there is one, into its folder in the checkpoint or export ``folder``. Collective."""
    if policy.adapter is None:
        return
    tensors = {name: tensor.cpu() for name, tensor in policy.adapter.whole(ranks.pp)}
    write_adapter(folder, tensors, policy.adapter.names, settings)
