"""The layouts and models that are checked, and a backend on one rank of a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from cases import BUDGET, FIXED, PADDED, TEMPERATURE, context, dynamic
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto import AutoModelForCausalLM

from miles.batch.schedule import schedule_step
from miles.config.cluster import ClusterArguments
from miles.config.megatron.settings import MegatronArguments
from miles.config.model import ModelArguments
from miles.config.optimizer import OptimizerArguments
from miles.config.parallel import ParallelArguments
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.config.training import TrainingArguments
from miles.objective.settings import LossArguments
from miles.training.megatron.backend import MegatronBackend
from miles.types.train_batch import TrainBatch, TrainShard

CPU = torch.device("cpu")
ONE = MegatronArguments()
TP = replace(ONE, tensor_model_parallel_size=2)
SP = replace(TP, sequence_parallel=True)
PP = replace(ONE, pipeline_model_parallel_size=2)
SHARDED = replace(ONE, use_distributed_optimizer=True)
EP = replace(ONE, expert_model_parallel_size=2)
DENSE = ("untied", "tied")
# Two or three micro-batches of each step, for ranks that all see every sample; FIXED and BUDGET make about four.
FEW = replace(FIXED, micro_batch_size=4)
FEW_BY_BUDGET = replace(BUDGET, max_tokens_per_gpu=40)


@dataclass(frozen=True)
class Layout:
    """``ranks`` divided by ``sizes`` and ``parallel``. ``models`` are those whose gradients are compared."""

    ranks: int
    sizes: MegatronArguments = ONE
    parallel: ParallelArguments = ParallelArguments()
    training: TrainingArguments = FEW
    models: tuple[str, ...] = ("untied",)
    given: dict[str, Any] = field(default_factory=dict)  # fields of Megatron's dataclasses


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS = {
    "one": Layout(1, models=("untied", "qwen3_moe")),
    "one, recomputed": Layout(1, given=RECOMPUTED),
    "one, padded": Layout(1, parallel=PADDED, models=("untied", "qwen3_moe")),
    "dp2": Layout(2, training=BUDGET),
    "dp2, padded": Layout(2, parallel=PADDED, training=BUDGET),
    "dp2, overlapped": Layout(2, training=FIXED, given={"overlap_grad_reduce": True}),
    "dp2, distributed optimizer": Layout(2, SHARDED, training=FIXED),
    "tp2": Layout(2, TP, models=("tied",)),
    "tp2 with sp": Layout(2, SP, training=FEW_BY_BUDGET, models=("untied", "qwen3_moe")),
    "tp2 with sp, padded": Layout(2, SP, PADDED, models=("untied", "qwen3_moe")),
    "pp2": Layout(2, PP, models=DENSE),
    "pp2, uneven": Layout(2, replace(PP, decoder_last_pipeline_num_layers=1), models=("three_layers",)),
    "pp3, interleaved": Layout(
        3,
        replace(ONE, pipeline_model_parallel_size=3, num_layers_per_virtual_pipeline_stage=1),
        training=BUDGET,
        models=("six_layers", "six_moe_layers", "six_glm4_moe_layers"),
    ),
    "pp2, padded": Layout(2, PP, PADDED, BUDGET),
    "cp2": Layout(2, ONE, context(2)),
    "ep2": Layout(2, EP, models=("qwen3_moe",)),
    "ep2 with cp2": Layout(2, EP, context(2), models=("qwen3_moe",)),
    "dynamic cp": Layout(2, ONE, dynamic(10), TrainingArguments()),
    "tp2 with sp, dp2, distributed optimizer": Layout(4, replace(SP, use_distributed_optimizer=True), training=BUDGET),
    "tp2 with sp, cp2": Layout(4, SP, context(2)),
    "pp2, cp2": Layout(4, PP, context(2), BUDGET),
    "tp2 with sp, pp2": Layout(4, replace(SP, pipeline_model_parallel_size=2), models=("tied",)),
    "tp2 with sp, ep2": Layout(
        4, replace(SP, expert_model_parallel_size=2, expert_tensor_parallel_size=1), models=("qwen3_moe",)
    ),
    "tp2 with sp, ep2, experts cut": Layout(4, replace(SP, expert_model_parallel_size=2), models=("qwen3_moe",)),
    "pp2, dynamic cp": Layout(4, PP, dynamic(10), TrainingArguments()),
    "one, sigmoid": Layout(1, models=("glm4_moe", "deepseek_v3")),
    "one, sigmoid, padded and recomputed": Layout(
        1, parallel=PADDED, models=("glm4_moe", "deepseek_v3"), given=RECOMPUTED
    ),
    "tp2 with sp, ep2, sigmoid": Layout(
        2,
        replace(SP, expert_model_parallel_size=2, expert_tensor_parallel_size=1),
        models=("glm4_moe", "deepseek_v3", "glm4_moe_lite"),
    ),
    "cp2 with ep2, sigmoid": Layout(2, EP, context(2), models=("glm4_moe", "deepseek_v3")),
    "pp2, dp2, sigmoid": Layout(
        4,
        replace(PP, use_distributed_optimizer=True),
        training=BUDGET,
        models=("glm4_moe", "deepseek_v3", "glm4_moe_lite"),
    ),
}
SIGMOID = ("glm4_moe", "deepseek_v3", "glm4_moe_lite")
SIX = ("six_layers", "six_moe_layers", "six_glm4_moe_layers")


@dataclass(frozen=True)
class RankProcess:
    """One rank of a layout, and the folder with the models, which the ranks share.

    ``whole`` is False in the fast tests, whose layouts take the models, dtypes and ways of a check by turns.
    """

    folder: Path
    name: str
    rank: int
    whole: bool = True

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.name]

    def model(self, name: str) -> str:
        return str(self.folder / name)


def small(**fields: Any) -> dict[str, Any]:
    shape: dict[str, Any] = dict(
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
    )
    return shape | fields


LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=16,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=0.7,
)
# Values are narrower than keys, and their widths differ from hidden_size / num_attention_heads.
LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=10, q_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8
)


def experts(groups: int, chosen_groups: int) -> dict[str, Any]:
    """Return the fields of sigmoid routing."""
    return dict(
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=2,
        n_group=groups,
        topk_group=chosen_groups,
        routed_scaling_factor=1.7,
        norm_topk_prob=True,
    ) | (dict(first_k_dense_replace=1))


MODELS: dict[str, PretrainedConfig] = {
    "tied": LlamaConfig(**small(tie_word_embeddings=True)),
    "untied": LlamaConfig(**small(head_dim=8)),
    "three_layers": LlamaConfig(**(small(head_dim=8) | {"num_hidden_layers": 3})),
    "six_layers": LlamaConfig(**(small(tie_word_embeddings=True) | {"num_hidden_layers": 6})),
    "six_moe_layers": Qwen3MoeConfig(
        **small(head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
        | {"num_hidden_layers": 6}
    ),
    "six_glm4_moe_layers": Glm4MoeConfig(
        **small(head_dim=8, attention_bias=True, use_qk_norm=True, partial_rotary_factor=0.5, **experts(1, 1))
        | {"num_hidden_layers": 6}
    ),
    "llama3_rope": LlamaConfig(**small(rope_parameters=LLAMA3_ROPE)),
    "qwen2": Qwen2Config(**small(tie_word_embeddings=True)),
    "qwen3": Qwen3Config(**small(head_dim=16)),
    "qwen3_moe": Qwen3MoeConfig(
        **small(head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
    ),
    "glm4_moe": Glm4MoeConfig(
        **small(head_dim=8, attention_bias=True, use_qk_norm=True, partial_rotary_factor=0.5, **experts(1, 1))
    ),
    "deepseek_v3": DeepseekV3Config(**small(rope_parameters=YARN, **experts(2, 1), **LATENT)),
    "glm4_moe_lite": Glm4MoeLiteConfig(
        **small(mlp_layer_types=["sparse", "dense"], **(experts(1, 1) | LATENT | {"q_lora_rank": None}))
    ),
}


MEASURED: dict[str, dict[str, float]] = {}  # on this rank, by what was measured: distance from the oracle, and the norm


def note(process: RankProcess, what: str, distance: float, norm: float = 0.0) -> None:
    """Keep the largest relative error of a gradient, and the last norm."""
    known = MEASURED.get(what, {}).get("distance", 0.0)
    MEASURED[what] = {"distance": max(known, distance), "norm": norm}


def models_of(process: RankProcess) -> list[str]:
    """Return the models that the layout trains: without experts if these are refused, only them if it needs them.

    Three layers are for stages that differ, six for several parts per rank. By turns, one rank has all models, and
    several ranks have those whose gradients are compared.
    """
    sizes = process.layout.sizes
    if not process.whole and process.layout.ranks > 1:
        return list(process.layout.models)
    if set(process.layout.models) <= set(SIGMOID):
        return list(SIGMOID)
    if sizes.decoder_last_pipeline_num_layers is not None:
        return ["three_layers"]
    if sizes.num_layers_per_virtual_pipeline_stage is not None:
        return list(process.layout.models)
    if sizes.expert_model_parallel_size > 1:
        return ["qwen3_moe"]
    refused = sizes.tensor_model_parallel_size > 1 and not sizes.sequence_parallel
    left_out = {*SIGMOID, "three_layers", *SIX} | ({"qwen3_moe"} if refused else set())
    return [name for name in MODELS if name not in left_out]


def save_models(folder: Path, models: dict[str, PretrainedConfig] = MODELS) -> None:
    """Save the models. Norms and biases are drawn too, so that a missing or swapped tensor shows."""
    for name, config in models.items():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in (*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("_bias"))):
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)


def plain_model(folder: Path, name: str, dtype: torch.dtype) -> Any:
    """Load transformers' model in this process; its fused experts do not compute in float64."""
    return AutoModelForCausalLM.from_pretrained(
        folder / name, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager"
    )


def make_backend(
    process: RankProcess,
    model: str,
    loss: LossArguments,
    total_steps: int = 10,
    auxiliary: dict[str, Any] | None = None,
    **optimizer: Any,
) -> MegatronBackend:
    """Build a backend. ``loss.calculate_per_token_loss`` sets Megatron's contract; steps may use another loss."""
    layout = process.layout
    settings = Settings(
        cluster=ClusterArguments(actor_num_gpus_per_node=layout.ranks),
        model=ModelArguments(hf_checkpoint=process.model(model)),
        rollout=RolloutArguments(rollout_temperature=TEMPERATURE),
        loss=loss,
        optimizer=OptimizerArguments(**optimizer),
        training=replace(layout.training, global_batch_size=7, train_backend="megatron"),
        parallel=layout.parallel,
        megatron=replace(layout.sizes, **(auxiliary or {})),
        megatron_overrides=tuple(layout.given.items()),
    )
    return MegatronBackend(settings, CPU, total_steps)


def shard_of(
    backend: MegatronBackend, batch: TrainBatch, has_gradient: Sequence[bool] | None = None, watch_mass: bool = True
) -> TrainShard:
    """Return this rank's shard, as the launcher distributes them."""
    settings, rank = backend.settings, torch.distributed.get_rank()
    shards = schedule_step(
        batch, settings.dims.token_ranks, settings.training, settings.parallel, has_gradient, watch_mass=watch_mass
    )
    return shards[settings.dims.token_rank(rank)]


def gradients(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    """Return whole gradients by Hugging Face name. With a distributed optimizer a rank has only its own part."""
    exported = backend.converter.export(backend.policy.stage, lambda p: p.main_grad, torch.float32)  # type: ignore[attr-defined]
    return {name: gradient.clone() for name, gradient in exported if not name.endswith("e_score_correction_bias")}


def weights(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    exported = backend.converter.export(backend.policy.stage, lambda p: p.data, torch.float32)
    return {name: weight.clone() for name, weight in exported}
