"""Layouts of tiny models that are rehearsed and run: the settings of each, and the folders of their configurations."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_llama import SHAPE
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from miles.arguments.cluster import ClusterArguments
from miles.arguments.data import DataArguments
from miles.arguments.megatron.settings import MegatronArguments
from miles.arguments.model import ModelArguments
from miles.arguments.parallel import ParallelArguments
from miles.arguments.rollout import RolloutArguments
from miles.arguments.settings import Settings
from miles.arguments.training import TrainingArguments
from miles.objective.settings import LossArguments
from miles.rewards.settings import RewardArguments

LARGER = SHAPE | dict(vocab_size=512, hidden_size=64, intermediate_size=160, head_dim=16)
DENSE = LARGER | dict(num_hidden_layers=4)
EXPERTS = DENSE | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)


@dataclass(frozen=True)
class Layout:
    """What differs between two layouts."""

    ranks: int
    backend: str = "fsdp"
    sizes: dict[str, Any] = field(default_factory=dict)  # of Megatron
    parallel: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    has_experts: bool = False

    def settings(self, folder: Path) -> Settings:
        """Return valid settings. Models are in ``folder``."""
        model = folder / ("experts" if self.has_experts else "dense")
        given = dict(global_batch_size=8, micro_batch_size=2, fp32=True) | self.training
        return Settings(
            cluster=ClusterArguments(actor_num_gpus_per_node=self.ranks, rollout_num_gpus=1, device="cpu"),
            model=ModelArguments(hf_checkpoint=str(model)),
            rollout=RolloutArguments(
                rollout_engine="torch",
                rollout_batch_size=4,
                n_samples_per_prompt=2,
                rollout_max_response_len=96,
                num_rollout=1,
            ),
            data=DataArguments(prompt_data="reasoning_gym:basic_arithmetic", rollout_max_prompt_len=40),
            reward=RewardArguments(rm_type="exact_match"),
            loss=LossArguments(**self.loss),
            training=TrainingArguments(train_backend=self.backend, **given),
            parallel=ParallelArguments(**self.parallel),
            megatron=MegatronArguments(**self.sizes),
        )


def save_models(folder: Path, weights: bool) -> None:
    """Save both configurations, with weights if a layout is run too."""
    for name, config in (("dense", LlamaConfig(**DENSE)), ("experts", Qwen3MoeConfig(**EXPERTS))):
        config.save_pretrained(folder / name)
        if weights:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)


TP2 = dict(tensor_model_parallel_size=2)
PP2 = dict(pipeline_model_parallel_size=2)
SHARDED = dict(use_distributed_optimizer=True)

FSDP = {
    "fsdp, 1 rank": Layout(1),
    "fsdp, 2 ranks": Layout(2),
    "fsdp, 2 ranks, recomputed": Layout(2, training=dict(gradient_checkpointing=True)),
    "fsdp, 2 ranks, padded": Layout(2, parallel=dict(qkv_format="bshd")),
    "fsdp, 2 ranks, whole logits": Layout(2, loss=dict(log_probs_chunk_size=-1)),
    "fsdp, 2 ranks, entropy": Layout(2, loss=dict(entropy_coef=0.1)),
    "fsdp, 2 ranks, reference": Layout(2, loss=dict(use_kl_loss=True, kl_loss_coef=0.1)),
}
MEGATRON = {
    "megatron, 1 rank": Layout(1, "megatron"),
    "megatron, DP 2": Layout(2, "megatron"),
    "megatron, DP 2, sharded optimizer": Layout(2, "megatron", SHARDED),
    "megatron, TP 2": Layout(2, "megatron", TP2),
    "megatron, TP 2, sequence": Layout(2, "megatron", TP2 | dict(sequence_parallel=True)),
    "megatron, PP 2": Layout(2, "megatron", PP2),
    "megatron, PP 2, recomputed": Layout(2, "megatron", PP2, training=dict(gradient_checkpointing=True)),
    "megatron, padded": Layout(2, "megatron", parallel=dict(qkv_format="bshd")),
    "megatron, experts": Layout(1, "megatron", has_experts=True),
    "megatron, EP 2": Layout(2, "megatron", dict(expert_model_parallel_size=2), has_experts=True),
}
