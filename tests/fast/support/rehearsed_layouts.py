"""Layouts of tiny models that are rehearsed and run: the settings of each, and the folders of their configurations."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_llama import SHAPE
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from miles.config.cluster import ClusterArguments
from miles.config.lora import LoraArguments
from miles.config.megatron.settings import MegatronArguments
from miles.config.model import ModelArguments
from miles.config.parallel import ParallelArguments
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.config.training import TrainingArguments
from miles.objective.settings import LossArguments
from miles.tasks.data.settings import DataArguments
from miles.tasks.rewards.settings import RewardArguments

LARGER = SHAPE | dict(vocab_size=512, hidden_size=64, intermediate_size=160, head_dim=16)
DENSE = LARGER | dict(num_hidden_layers=4)
EXPERTS = DENSE | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
SMOLLM2_135M = dict(  # the shape of HuggingFaceTB/SmolLM2-135M
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


@dataclass(frozen=True)
class Layout:
    """What differs between two layouts."""

    ranks: int
    backend: str = "fsdp"
    sizes: dict[str, Any] = field(default_factory=dict)  # of Megatron
    parallel: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    model: str = "dense"

    def settings(self, folder: Path) -> Settings:
        """Return valid settings. Models are in ``folder``."""
        is_tiny = self.model != "135M"
        precision = dict(fp32=True) if is_tiny else dict(bf16=True)
        fields = dict(global_batch_size=8, micro_batch_size=2) | precision | self.training
        return Settings(
            cluster=ClusterArguments(actor_num_gpus_per_node=self.ranks, rollout_num_gpus=1, device="cpu"),
            model=ModelArguments(hf_checkpoint=str(folder / self.model)),
            rollout=RolloutArguments(
                rollout_engine="torch",
                rollout_batch_size=fields["global_batch_size"] // 2,
                n_samples_per_prompt=2,
                rollout_max_response_len=96 if is_tiny else 16,  # bf16 products are slow on many processors
                num_rollout=1,
            ),
            data=DataArguments(
                prompt_data="reasoning_gym:basic_arithmetic", rollout_max_prompt_len=40 if is_tiny else 16
            ),
            reward=RewardArguments(rm_type="exact_match"),
            loss=LossArguments(**self.loss),
            training=TrainingArguments(train_backend=self.backend, **fields),
            parallel=ParallelArguments(**self.parallel),
            megatron=MegatronArguments(**self.sizes),
            lora=LoraArguments(**self.lora),
        )


def save_models(folder: Path, weights: bool) -> None:
    """Save the tiny configurations, with weights if a layout is run too."""
    save_model(folder / "dense", LlamaConfig(**DENSE), weights)
    save_model(folder / "deep", LlamaConfig(**DENSE | dict(num_hidden_layers=6)), weights)
    save_model(folder / "experts", Qwen3MoeConfig(**EXPERTS), weights)


def save_model(folder: Path, config: PretrainedConfig, weights: bool) -> None:
    """Save a configuration, and random weights if these are wanted."""
    config.save_pretrained(folder)
    if weights:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def save_135m(folder: Path) -> None:
    """Save random weights of SmolLM2-135M's shape."""
    save_model(folder / "135M", LlamaConfig(**SMOLLM2_135M), weights=True)


TP2 = dict(tensor_model_parallel_size=2)
PP2 = dict(pipeline_model_parallel_size=2)
EP2 = dict(expert_model_parallel_size=2)
CP2 = dict(context_parallel_size=2)
SEQUENCE = dict(sequence_parallel=True)
SHARDED = dict(use_distributed_optimizer=True)
REFERENCE = dict(use_kl_loss=True, kl_loss_coef=0.1)
CRITIC = dict(advantage_estimator="ppo")
RECOMPUTED = dict(gradient_checkpointing=True)
ADAPTER = dict(lora_rank=4, target_modules=("q_proj", "o_proj"))

FSDP = {
    "fsdp, 1 rank": Layout(1),
    "fsdp, 2 ranks": Layout(2),
    "fsdp, 2 ranks, recomputed": Layout(2, training=RECOMPUTED),
    "fsdp, 2 ranks, padded": Layout(2, parallel=dict(qkv_format="bshd")),
    "fsdp, 2 ranks, whole logits": Layout(2, loss=dict(log_probs_chunk_size=-1)),
    "fsdp, 2 ranks, entropy": Layout(2, loss=dict(entropy_coef=0.1)),
    "fsdp, 2 ranks, reference": Layout(2, loss=REFERENCE),
    "fsdp, 2 ranks, critic": Layout(2, loss=CRITIC),
    "fsdp, 2 ranks, adapter": Layout(2, lora=ADAPTER),
    "fsdp, 2 ranks, experts": Layout(2, model="experts"),
    "fsdp, CP 2": Layout(2, parallel=CP2),
    "fsdp, DP 2, CP 2": Layout(4, parallel=CP2),
    "fsdp, 135M, 2 ranks": Layout(2, model="135M"),
    "fsdp, 135M, CP 2, recomputed": Layout(2, parallel=CP2, training=RECOMPUTED, model="135M"),
}
MEGATRON = {
    "megatron, 1 rank": Layout(1, "megatron"),
    "megatron, DP 2": Layout(2, "megatron"),
    "megatron, DP 2, sharded optimizer": Layout(2, "megatron", SHARDED),
    "megatron, TP 2": Layout(2, "megatron", TP2),
    "megatron, TP 2, sequence": Layout(2, "megatron", TP2 | SEQUENCE),
    "megatron, PP 2": Layout(2, "megatron", PP2),
    "megatron, PP 2, recomputed": Layout(2, "megatron", PP2, training=RECOMPUTED),
    "megatron, padded": Layout(2, "megatron", parallel=dict(qkv_format="bshd")),
    "megatron, reference": Layout(2, "megatron", loss=REFERENCE),
    "megatron, critic": Layout(2, "megatron", loss=CRITIC),
    "megatron, adapter": Layout(2, "megatron", lora=ADAPTER),
    "megatron, CP 2": Layout(2, "megatron", parallel=CP2),
    "megatron, TP 2, CP 2": Layout(4, "megatron", TP2 | SEQUENCE, parallel=CP2),
    "megatron, TP 2, PP 2": Layout(4, "megatron", TP2 | PP2 | SEQUENCE),
    "megatron, PP 3, interleaved": Layout(
        3,
        "megatron",
        dict(pipeline_model_parallel_size=3, num_layers_per_virtual_pipeline_stage=1),
        training=dict(global_batch_size=12),
        model="deep",
    ),
    "megatron, experts": Layout(1, "megatron", model="experts"),
    "megatron, EP 2": Layout(2, "megatron", EP2, model="experts"),
    "megatron, EP 2, PP 2": Layout(4, "megatron", EP2 | PP2 | SHARDED, model="experts"),
    "megatron, EP 2, TP 2": Layout(4, "megatron", EP2 | TP2 | SEQUENCE, model="experts"),
    "megatron, 135M, DP 2, sharded optimizer": Layout(2, "megatron", SHARDED, model="135M"),
    "megatron, 135M, PP 2": Layout(2, "megatron", PP2, model="135M"),
    "megatron, 135M, TP 3, sequence": Layout(
        3, "megatron", dict(tensor_model_parallel_size=3) | SEQUENCE, model="135M"
    ),
}
LAYOUTS = FSDP | MEGATRON
