"""The layouts that are checked, and a backend on one rank of one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stage import CPU, PLAIN, TEMPERATURE, assert_same_gradient, assert_same_metrics, loss_of
from transformers import (
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto import AutoModelForCausalLM

from miles.arguments.checkpoint import CheckpointArguments
from miles.arguments.cluster import ClusterArguments
from miles.arguments.data import DataArguments
from miles.arguments.evaluation import EvaluationArguments
from miles.arguments.loss import LossArguments
from miles.arguments.megatron import MegatronArguments
from miles.arguments.model import ModelArguments
from miles.arguments.optimizer import OptimizerArguments
from miles.arguments.reward import RewardArguments
from miles.arguments.rollout import RolloutArguments
from miles.arguments.settings import Settings
from miles.arguments.tracking import TrackingArguments
from miles.arguments.training import TrainingArguments
from miles.batching.schedule import schedule_step
from miles.tracking.metrics import Metric
from miles.train_batch import TrainBatch, TrainShard
from miles.training.megatron.backend import MegatronBackend

__all__ = ["assert_same_gradient", "assert_same_metrics", "loss_of"]

TP2 = MegatronArguments(tensor_model_parallel_size=2)
PP2 = MegatronArguments(pipeline_model_parallel_size=2)
DIST_OPT = MegatronArguments(use_distributed_optimizer=True)


@dataclass(frozen=True)
class Layout:
    """So many ranks, split as ``sizes`` says."""

    ranks: int
    sizes: MegatronArguments = MegatronArguments()
    context_parallel_size: int = 1


LAYOUTS = {
    "one": Layout(1),
    "dp2": Layout(2),
    "dp2_distributed_optimizer": Layout(2, DIST_OPT),
    "tp2": Layout(2, TP2),
    "tp2_sp": Layout(2, replace(TP2, sequence_parallel=True)),
    "pp2": Layout(2, PP2),
    "dp2_tp2_sp": Layout(4, replace(TP2, sequence_parallel=True, use_distributed_optimizer=True)),
    "dp2_pp2": Layout(4, PP2),
    "tp2_pp2": Layout(4, replace(TP2, pipeline_model_parallel_size=2, sequence_parallel=True)),
}


@dataclass(frozen=True)
class Stand:
    """Where one rank stands: its layout, which models there are, and a folder that the ranks share."""

    folder: Path
    name: str
    rank: int

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.name]

    def model(self, name: str) -> str:
        return str(self.folder / name)


def _common(**given: Any) -> dict[str, Any]:
    return dict(
        vocab_size=66,  # a multiple of 2, not of 4
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **given,
    )


MODELS: dict[str, PretrainedConfig] = {
    "tied": LlamaConfig(**_common(tie_word_embeddings=True)),
    "untied": LlamaConfig(**_common(head_dim=8)),
    "llama3_rope": LlamaConfig(
        **_common(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=10000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            )
        )
    ),
    "qwen2": Qwen2Config(**_common(tie_word_embeddings=True)),
    "qwen3": Qwen3Config(**_common(head_dim=16)),
    "qwen3_moe": Qwen3MoeConfig(
        **_common(head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
    ),
}


def models_of(stand: Stand) -> list[str]:
    """All, less those with experts where the layout is refused for them (arguments/megatron_rules.py)."""
    sizes = stand.layout.sizes
    refused = sizes.tensor_model_parallel_size > 1 and not sizes.sequence_parallel
    return [name for name in MODELS if not (refused and name == "qwen3_moe")]


def save_models(folder: Path) -> None:
    """Weights are drawn wide, biases and norms too, so that a tensor left out or swapped shows."""
    for name, config in MODELS.items():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)


def make_backend(
    stand: Stand, model: str, *, per_token: bool = False, total_steps: int = 10, **optimizer: Any
) -> MegatronBackend:
    """``per_token`` is Megatron's contract; the objective is the loss section's, given step by step."""
    settings = Settings(
        cluster=ClusterArguments(actor_num_gpus_per_node=stand.layout.ranks),
        model=ModelArguments(
            hf_checkpoint=stand.model(model), context_parallel_size=stand.layout.context_parallel_size
        ),
        data=DataArguments(),
        reward=RewardArguments(),
        rollout=RolloutArguments(rollout_temperature=TEMPERATURE),
        loss=loss_of("token_mean") if per_token else PLAIN,
        optimizer=OptimizerArguments(**optimizer),
        training=TrainingArguments(global_batch_size=7, train_backend="megatron"),
        megatron=stand.layout.sizes,
        checkpoint=CheckpointArguments(),
        evaluation=EvaluationArguments(),
        tracking=TrackingArguments(),
    )
    return MegatronBackend(settings, CPU, total_steps)


def shard_of(
    backend: MegatronBackend,
    batch: TrainBatch,
    training: TrainingArguments,
    has_gradient: Sequence[bool] | None = None,
) -> TrainShard:
    return schedule_step(batch, backend.ranks.dp.size(), training, has_gradient)[backend.ranks.dp.rank()]


def gradients(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    """Whole gradients under Hugging Face names. With a distributed optimizer a rank has only its own part of them."""
    exported = backend.converter.export(backend.policy, lambda p: p.main_grad, torch.float32)  # type: ignore[attr-defined]
    return {name: gradient.clone() for name, gradient in exported}


def weights(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    exported = backend.converter.export(backend.policy, lambda p: p.data, torch.float32)
    return {name: weight.clone() for name, weight in exported}


def gradient_step(
    backend: MegatronBackend, shard: TrainShard, loss: LossArguments
) -> tuple[dict[str, torch.Tensor], dict[str, Metric]]:
    """Gradients and metrics of a step that is then thrown away."""
    backend.settings = replace(backend.settings, loss=loss)
    metrics = backend.forward_backward(shard)
    found = gradients(backend)
    backend.skip_step()
    return found, metrics


def same_on_all_ranks(value: Any) -> bool:
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, value)
    return all(report == reports[0] for report in reports)
