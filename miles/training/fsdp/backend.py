"""The FSDP2 backend: ``TrainBackend`` for one rank, on CPU (gloo) or CUDA (NCCL)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from miles.batch.collate import collate
from miles.batch.convert import convert
from miles.config.components import engine_spec
from miles.config.lora import LoraArguments
from miles.config.parallel import ParallelArguments
from miles.config.settings import Settings
from miles.models.packing import (
    is_compared_by_test,
    model_type,
    must_be_padded,
    why_not_shared,
    why_not_trained,
)
from miles.models.reading import read_config
from miles.models.routers import Routers
from miles.objective.settings import LossArguments
from miles.training import checkpoint_files
from miles.training.adapter_folder import adapter_folder, check_adapter
from miles.training.backend import PolicyScorer, TrainBackend, ValueScorer
from miles.training.checkpoint_files import saved_reference
from miles.training.checkpoint_io import StagedFiles
from miles.training.fsdp import checkpoint
from miles.training.fsdp.adapter import add_adapter, merged_weights, names_on_disk, save_adapter
from miles.training.fsdp.checkpoint import as_on_disk
from miles.training.fsdp.models import (
    Policy,
    ShardedModule,
    load_model,
    load_policy,
    load_value_model,
    shard_model,
)
from miles.training.fsdp.runner import FsdpBaseModel, FsdpModel, FsdpTrainedModel, ShardedOptimizer
from miles.training.packed_attention import NAME
from miles.training.scoring import check_can_follow, check_same_positions, follow, names_of_state
from miles.types.groups import ALONE, ContextGroups
from miles.types.sample import Prompt, PromptGroup, Sample
from miles.types.train_batch import TrainBatch
from miles.types.weights import WeightChunk, in_chunks

# Compare a model with transformers before it is trained: packed samples, padded samples, and each sample on its own.
#
# A layer that ignores the bounds of samples carries its state into the next one, and nothing else notices: the loss is
# finite, and the gradient belongs to another model. Types of models that a test compares are in models/packing.py; all
# others are compared here, once, with their own weights.


_GROUPS = ((4, (6, 9)), (3, (2,)))  # tokens of the prompt, which is kept once when packed, and of its responses


def check_layout(flag: str, path: str, parallel: ParallelArguments) -> None:
    """Refuse a model that is not trained, and one in a layout that may not suit its layers.

    Validation does so, and pads on its own, if it can read the config; of a model on a hub it is known only here.

    Args:
        flag: The flag that names the model.
        path: Its value.
        parallel: The layout of samples.

    Raises:
        ValueError: The model is not trained; or it has recurrent state or sparse attention, and ranks would share
            its sequences; or it has recurrent state, and packing has not been tested.
    """
    config = read_config(path).to_dict()
    if fault := why_not_trained(config):
        raise ValueError(f"{flag} {path}: {'; '.join(fault)}")
    shared = parallel.dynamic_context_parallel or parallel.context_parallel_size > 1
    if shared and (why := why_not_shared(config)):
        drop = "--dynamic-context-parallel" if parallel.dynamic_context_parallel else "--context-parallel-size"
        rule = f"a {model_type(config)} {why} needs whole sequences"
        raise ValueError(f"{flag} {path}: {rule}; drop {drop}, which cuts them")
    if not parallel.pads and must_be_padded(config):
        raise ValueError(
            f"{flag} {path}: a {model_type(config)} has recurrent state, which may pass from one packed sample to "
            f"the next; {_how_to_pad(parallel)}"
        )


def check_untested_model(
    policy: Policy, flag: str, path: str, parallel: ParallelArguments, device: torch.device
) -> None:
    """Compare a model with transformers, unless a test of miles compares its type.

    Args:
        policy: The model with its weights, not sharded.
        flag: The flag that names it.
        path: Its value.
        parallel: The layout of samples.
        device: The device of training; a model that is compared is moved there whole.

    Raises:
        ValueError: As ``compare_with_transformers``.
    """
    if not is_compared_by_test(policy.language_model.config.to_dict()):
        compare_with_transformers(policy.to(device), f"{flag} {path}", parallel)


def compare_with_transformers(policy: Policy, name: str, parallel: ParallelArguments) -> None:
    """Compare log-probs of three tiny samples: padded with transformers, and packed with padded if samples are packed.

    Rounding may change half of the digits of the weights' dtype: the mean difference may be ``sqrt(eps)``, 3.5e-4 in
    float32. It is the mean, since in bfloat16 a router may send a single token to another expert.

    Args:
        policy: The model with its weights, not sharded.
        name: What errors call it.
        parallel: The layout of samples.

    Raises:
        ValueError: They differ by more, with the figures and what to do.
    """
    model = policy.language_model
    kind, allowed = model_type(model.config.to_dict()), math.sqrt(torch.finfo(model.dtype).eps)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        own = own_log_probs(policy)
        padded = layout_log_probs(policy, name, packed=False)
        rule = f"{name}: log-probs of a {kind} differ from transformers'"
        _check_difference(own, padded, allowed, rule, "choose another model")
        if not parallel.pads:
            packed = layout_log_probs(policy, name, packed=True)
            rule = f"{name}: log-probs of a {kind} depend on the samples that are packed before"
            _check_difference(padded, packed, allowed, rule, _how_to_pad(parallel))
        model.train()
        rule = f"{name}: log-probs of a {kind} differ between training and scoring"
        trained = layout_log_probs(policy, name, packed=False)
        _check_difference(padded, trained, allowed, rule, "set its dropout to 0 in its config.json")
    model.train(was_training)


def own_log_probs(policy: Policy) -> torch.Tensor:
    """Compute the tiny samples by transformers alone: its attention, its head, one by one; float32 [R]."""
    model = policy.language_model
    batch = _tiny_batch(model)
    model.set_attn_implementation("eager")
    found = []
    try:
        for tokens, response in zip(batch.tokens, batch.response_lengths, strict=True):
            ids = torch.as_tensor(tokens, device=model.device)
            logits = model(input_ids=ids[None], use_cache=False).logits[0, -response - 1 : -1]
            log_probs = (logits.float() / (policy.temperature or 1.0)).log_softmax(-1)
            found.append(log_probs.gather(-1, ids[-response:, None])[:, 0])
    finally:
        model.set_attn_implementation(NAME)
    return torch.cat(found)


def layout_log_probs(policy: Policy, name: str, packed: bool) -> torch.Tensor:
    """Compute the tiny samples as training does, packed or padded; float32 [R].

    Raises:
        ValueError: The layers do not take the layout.
    """
    model = policy.language_model
    batch = _tiny_batch(model)
    micro = collate(batch, range(len(batch)), model.device, ALONE, row_multiple=None if packed else 1)
    try:
        return policy.scorer(micro)(with_entropy=False).log_probs.float()
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, LookupError, RuntimeError) as error:
        kind = model_type(model.config.to_dict())
        raise ValueError(
            f"{name}: the layers of a {kind} do not take the layout of samples ({error}); choose another model"
        ) from error


def _how_to_pad(parallel: ParallelArguments) -> str:
    if parallel.dynamic_context_parallel:
        return "drop --dynamic-context-parallel and add --qkv-format bshd"
    if parallel.context_parallel_size > 1:
        return "drop --context-parallel-size and add --qkv-format bshd"
    return "add --qkv-format bshd"


def _check_difference(a: torch.Tensor, b: torch.Tensor, allowed: float, rule: str, what_to_do: str) -> None:
    difference = (a - b).abs()
    mean, largest = difference.mean().item(), difference.max().item()
    if not mean <= allowed:  # NaN is refused
        figures = (
            f"they differ by {mean:.1e} on average and {largest:.1e} at most, {allowed:.1e} on average is rounding"
        )
        raise ValueError(f"{rule}: on {len(a)} tokens {figures}; {what_to_do}")


def _tiny_batch(model: PreTrainedModel) -> TrainBatch:
    """Return a step of three samples of random tokens, two of them of one prompt."""
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = rng.integers(0, embeddings.num_embeddings, count).tolist()
        return drawn

    groups, total = [], 0
    for index, (prompt_length, responses) in enumerate(_GROUPS):
        prompt = Prompt("", tuple(tokens(prompt_length)))
        samples = [Sample(prompt, index, total + i, tokens(n), "", [1] * n, [0.0] * n) for i, n in enumerate(responses)]
        groups.append(PromptGroup(index, prompt, [replace(sample, reward=0.0) for sample in samples]))
        total += len(samples)
    return convert(groups, loss=LossArguments(), global_batch_size=total)[0]


class FsdpBackend:
    """One rank. The process group must be initialized.

    It has all settings, because the objects that it builds read most of them: the models (model, training, parallel,
    rollout, loss, lora), their optimizers (optimizer, critic) and the ranks (cluster).
    """

    def __init__(self, settings: Settings, device: torch.device, total_steps: int) -> None:
        assert settings.model.hf_checkpoint is not None
        torch.manual_seed(settings.training.seed)
        self.device = device
        self.settings = settings
        self.compute_dtype = torch.bfloat16 if settings.training.bf16 else torch.float32
        self.mesh = init_device_mesh(device.type, (settings.cluster.world_size,))
        self.groups = ContextGroups(settings.dims)
        self.token_group: dist.ProcessGroup | None = None
        check_layout("--hf-checkpoint", settings.model.hf_checkpoint, settings.parallel)
        self.policy = self._build_policy(settings.model.hf_checkpoint, settings.policy_steps(total_steps))
        self.critic: FsdpTrainedModel[ValueScorer] | None = None
        if settings.loss.has_critic:
            self.critic = self._build_critic(settings.model.hf_checkpoint, total_steps)
        self.reference: FsdpModel[PolicyScorer] | None = None
        if settings.loss.needs_reference:
            self.reference = self._build_reference(settings.model.ref_load)
        self.teacher: FsdpModel[PolicyScorer] | None = None
        if settings.loss.teacher_is_loaded:
            self.teacher = self._build_frozen("--opd-teacher-load", settings.model.opd_teacher_load)

    def _build_policy(self, path: str, total_steps: int) -> FsdpTrainedModel[PolicyScorer]:
        lora = self.settings.lora
        dtype = self.compute_dtype if lora.trains_adapter else torch.float32  # weights that are updated need fp32
        policy = self._load_policy("--hf-checkpoint", path, dtype, lora)
        policy.train()
        optimizer = ShardedOptimizer(policy.language_model, self.settings.optimizer, total_steps)
        model = FsdpTrainedModel(policy, optimizer, self.groups, self.device)
        if self.settings.rollout.use_rollout_routing_replay:
            policy.routers = Routers(policy.language_model, "--use-rollout-routing-replay")
        elif self.settings.training.use_routing_replay:
            policy.routers = Routers(policy.language_model, "--use-routing-replay")
            model.record_experts(policy.routers)
        return model

    def _build_critic(self, path: str, total_steps: int) -> FsdpTrainedModel[ValueScorer]:
        model = load_value_model(path, torch.float32, self._read)
        self._shard(model)
        model.train()
        optimizer = ShardedOptimizer(model, self.settings.critic_optimizer, total_steps, rate_flag="--critic-lr")
        return FsdpTrainedModel(model, optimizer, self.groups, self.device)

    def _build_reference(self, ref_load: str | None) -> FsdpModel[PolicyScorer]:
        """Return the model of ``--ref-load``, or the one that training starts from.

        Under an adapter that one is frozen already.
        """
        if ref_load is None and self.settings.lora.trains_adapter:
            return FsdpBaseModel(self.policy.module, self.groups, self.device)
        if self.settings.model.ref_update_interval is None:
            return self._build_frozen("--ref-load", ref_load)
        mixes = self.settings.model.ref_mixup_alpha < 1
        reference = self._build_frozen("--ref-load", ref_load, torch.float32 if mixes else self.compute_dtype)
        check_can_follow(_state(reference.module), _state(self.policy.module), ref_load)
        check_same_positions(reference.module.language_model.config, self.policy.module.language_model.config, ref_load)
        return reference

    def _build_frozen(self, flag: str, path: str | None, dtype: torch.dtype | None = None) -> FsdpModel[PolicyScorer]:
        """Freeze a model: a Hugging Face folder, or a checkpoint of this backend; None is ``--hf-checkpoint``.

        ``dtype`` is the dtype in which weights are kept; by default, the one in which they are computed with.
        """
        dtype = dtype or self.compute_dtype
        hf_checkpoint = self.settings.model.hf_checkpoint
        assert hf_checkpoint is not None
        folder = checkpoint_files.at(Path(path)) if path is not None else None
        if path is None or folder is not None:
            model = self._load_policy("--hf-checkpoint", hf_checkpoint, dtype)
        else:
            check_layout(flag, path, self.settings.parallel)
            model = self._load_policy(flag, path, dtype)
        if folder is not None:
            self._read_frozen(folder, model, f"{flag} {path}")
        model.eval().requires_grad_(False)
        return FsdpModel(model, self.groups, self.device)

    def _load_policy(self, flag: str, path: str, dtype: torch.dtype, lora: LoraArguments | None = None) -> Policy:
        temperature, chunk_size = self.settings.rollout.rollout_temperature, self.settings.loss.log_probs_chunk_size
        policy = load_policy(
            path, temperature, chunk_size, dtype, self._read, fp32_head=self.settings.training.fp32_lm_head
        )
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
        if engine_spec(self.settings.rollout.rollout_engine).has_servers:
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
        self.policy.module.to(device)
        for frozen in (self.reference, self.teacher):
            if frozen is not None:
                frozen.module.to(device)
        if self.critic is not None:
            self.critic.module.to(device)
            self.critic.optimizer.to(device)
        self.policy.optimizer.to(device)

    def refresh_reference(self) -> None:
        """Let the reference follow the policy."""
        assert self.reference is not None, "validate() demands a reference"
        reference = {name: _local(weight) for name, weight in _state(self.reference.module).items()}
        policy = {
            # Weights that are updated are fp32, and gathered in compute dtype; buffers stay unchanged.
            name: _local(weight).to(self.compute_dtype) if isinstance(weight, nn.Parameter) else weight
            for name, weight in _state(self.policy.module).items()
        }
        follow(reference, policy, self.settings.model.ref_mixup_alpha)

    def save(self, folder: Path, state: dict[str, Any], staged: StagedFiles | None = None) -> None:
        """Write the critic, if there is one, a reference that follows the policy, and the policy."""
        if self.critic is not None:
            checkpoint.save_critic(folder, self.critic.module, self.critic.optimizer, staged)
        if self.reference is not None and self.settings.model.ref_update_interval is not None:
            checkpoint.save_reference(folder, self.reference.module.language_model, staged)
        self._save_adapter(folder)
        checkpoint.save(folder, self.policy.module.language_model, self.policy.optimizer, state, staged)

    def load(self, folder: Path, optimizer: bool = True, rng: bool = True, reference: bool = True) -> dict[str, Any]:
        """Read what ``save`` wrote, on any number of ranks."""
        language_model, lora = self.policy.module.language_model, self.settings.lora
        check_adapter(folder, lora, names_on_disk(language_model), "--load")
        state = checkpoint.load(folder, self.policy.module.language_model, self.policy.optimizer, optimizer, rng)
        if self.critic is not None:
            checkpoint.load_critic(folder, self.critic.module, self.critic.optimizer, optimizer)
        if not reference:
            return state
        within = saved_reference(folder, self.settings.model.ref_update_interval, self.reference is not None)
        if within is not None:
            assert self.reference is not None, "validate() demands a reference"
            checkpoint.load_reference(within, self.reference.module.language_model)
        return state

    def export_hf(self, folder: Path) -> None:
        """Write weights (in compute dtype), config and generation config as transformers would. Rank 0 writes."""
        checkpoint.export_hf(folder, self.policy.module.language_model, self._full_weights(), self.compute_dtype)
        self._save_adapter(folder)

    def _save_adapter(self, folder: Path) -> None:
        lora, base = self.settings.lora, self.settings.model.hf_checkpoint
        if lora.trains_adapter:
            assert base is not None
            save_adapter(adapter_folder(folder), self.policy.module.language_model, lora, base)


def _state(policy: ShardedModule[PolicyScorer]) -> dict[str, torch.Tensor]:
    return dict(names_of_state(policy.language_model))


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def build(settings: Settings, device: torch.device, total_steps: int) -> TrainBackend:
    """Build the backend of this rank."""
    return FsdpBackend(settings, device, total_steps)
