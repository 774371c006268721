"""Flags of Megatron that change no result here: fields of its dataclasses by name, and arguments of its own scripts.

What determines a result stays with ``config/megatron/overrides.py``: the model's shape, and what is passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.compat.launch.foreign import by_flag, noted, refused
from miles.config.abilities import reads_megatron_flags
from miles.config.model import readable_config
from miles.config.notes import MEMORY, NO_EFFECT, REPORTING, SAME, SPEED
from miles.config.settings import Settings

_OPTIMIZER = "the optimizer is torch's AdamW with fp32 state, pinned if it is in host memory"
_RECOMPUTED = "recomputation is that of whole layers, one by one"

# Fields whose every value gives the same results: heading of the note, and reason.
FREE_FIELDS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        (
            "attention_backend",
            "moe_grouped_gemm",
            "moe_use_legacy_grouped_gemm",
            "moe_permute_fusion",
            "moe_router_fusion",
            "moe_token_dispatcher_type",
            "moe_flex_dispatcher_backend",
            "moe_enable_deepep",
            "moe_deepep_num_sms",
            "moe_hybridep_num_sms",
            "moe_shared_expert_overlap",
            "overlap_moe_expert_parallel_comm",
            "transformer_impl",
            "cp_comm_type",
            "rope_fusion",
            "apply_rope_fusion",
            "fused_single_qkv_rope",
            "bias_activation_fusion",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "persist_layer_norm",
            "memory_efficient_layer_norm",
            "gradient_accumulation_fusion",
            "async_tensor_model_parallel_allreduce",
            "cross_entropy_loss_fusion",
            "cross_entropy_fusion_impl",
            "tp_comm_overlap",
            "tp_comm_bootstrap_backend",
            "overlap_p2p_comm",
            "batch_p2p_comm",
            "delay_wgrad_compute",
            "defer_embedding_wgrad_compute",
            "wgrad_deferral_limit",
            "overlap_param_gather",
            "overlap_param_gather_with_optimizer_step",
            "align_param_gather",
            "bucket_size",
            "pad_buckets_for_high_nccl_busbw",
            "nccl_ub",
            "gradient_reduce_div_fusion",
            "use_te_activation_func",
            "use_te_rng_tracker",
            "enable_cuda_graph",
            "cuda_graph_impl",
            "cuda_graph_scope",
            "disable_parameter_transpose_cache",
            "perform_initialization",
            "use_cpu_initialization",
            "init_model_with_meta_device",
        ),
        (SPEED, "the backend chooses its kernels and transfers"),
    ),
    **dict.fromkeys(
        (
            "use_torch_optimizer_for_cpu_offload",
            "use_precision_aware_optimizer",
            "pin_cpu_grads",
            "pin_cpu_params",
        ),
        (SAME, _OPTIMIZER),
    ),
    **dict.fromkeys(
        (
            "distribute_saved_activations",
            "recompute_modules",
            "moe_layer_recompute",
            "cpu_offloading",
            "cpu_offloading_num_layers",
            "fine_grained_activation_offloading",
            "offload_modules",
            "min_offloaded_tensor_size",
            "deallocate_pipeline_outputs",
        ),
        (MEMORY, _RECOMPUTED),
    ),
    **dict.fromkeys(
        ("check_for_nan_in_grad", "check_for_large_grads"), (SAME, "a gradient that is not finite stops the run")
    ),
    **dict.fromkeys(
        (
            "barrier_with_L1_time",
            "log_num_zeros_in_grad",
            "log_max_attention_logit",
            "moe_per_layer_logging",
            "config_logger_dir",
        ),
        (REPORTING, "metrics are in --output-dir"),
    ),
    **dict.fromkeys(
        ("init_method_std", "embedding_init_method_std"), (NO_EFFECT, "every weight is read from --hf-checkpoint")
    ),
}


def _trains_any_layer(settings: Settings, given: Mapping[str, Any]) -> bool:
    """Return whether layers are those of transformers, or of Megatron-Bridge, and not those that flags describe."""
    return not reads_megatron_flags(settings) or settings.megatron.megatron_to_hf_mode == "bridge"


def _has_llama3_rope(settings: Settings, given: Mapping[str, Any]) -> bool:
    """Return whether the rotary embedding of the model is scaled as Llama 3.1's, or may be: its config is not here."""
    config = readable_config(settings.model)
    if config is None:
        return True
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return bool(rope.get("rope_type", rope.get("type")) == "llama3")


_NO_LAYER = "no model with this layer is computed by --train-backend megatron"
_OTHER_MODEL = "choose another model, or --train-backend fsdp for others"
_SPEED = noted(
    SPEED,
    "the backend chooses its kernels and transfers",
    "--no-gradient-accumulation-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-masked-softmax-fusion",
    "--no-persist-layer-norm",
    "--enable-experimental",
    "--use-flash-attn",
    "--use-mcore-models",
    "--empty-unused-memory-level V",
    "--manual-gc",
    "--manual-gc-interval V",
    "--moe-upcycling-granularity V",
    is_megatron=True,
)
_MODEL = [
    *noted(
        SAME,
        "weights are read and named as the family of --hf-checkpoint says",
        "--spec V...",
        "--model-name V",
        is_megatron=True,
    ),
    *noted(
        SAME,
        "the vocabulary has the size of --hf-checkpoint",
        "--make-vocab-size-divisible-by V",
        is_megatron=True,
    ),
    *noted(
        SAME,
        "the tokenizer and the lengths of sequences are those of the run",
        "--tokenizer-type V",
        "--tokenizer-model V",
        "--seq-length V",
        "--no-create-attention-mask-in-dataloader",
        is_megatron=True,
    ),
    *noted(
        SAME,
        "a gradient that is not finite stops the run",
        "--no-check-for-nan-in-loss-and-grad",
        is_megatron=True,
    ),
    *noted(
        SAME,
        "biases of experts stay those of the checkpoint",
        "--freeze-e-score-correction-bias",
        is_megatron=True,
    ),
    *noted(
        SAME,
        "gradients are accumulated and reduced in fp32, which is more exact",
        "--grad-reduce-in-bf16",
        is_megatron=True,
    ),
    *noted(
        REPORTING,
        "every step is logged",
        "--log-interval V",
        "--log-throughput",
        "--timing-log-level V",
        is_megatron=True,
    ),
]
_STAGES = noted(
    SPEED,
    "a pipeline is interleaved by --num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank V",
    is_megatron=True,
)
_REFUSED = [
    *refused(
        "the rotary embedding is that of --hf-checkpoint, whose config scales it otherwise",
        "drop it, or give rope_scaling in that config",
        "--use-rope-scaling",
        "--rope-scaling-factor V",
        accepted_if=_has_llama3_rope,
        accepted_why="the rotary embedding is scaled as --hf-checkpoint says",
        is_megatron=True,
    ),
    *refused(
        "gradients, moments and master weights are fp32",
        "drop it, or give fp32",
        "--main-grads-dtype V",
        "--main-params-dtype V",
        "--exp-avg-dtype V",
        "--exp-avg-sq-dtype V",
        neutral=("fp32",),
        is_megatron=True,
    ),
    *refused(
        "layers in low precision were not compared with an oracle",
        "drop it: the run computes in bf16 with fp32 master weights, or in fp32",
        "--te-precision-config-file V",
        is_megatron=True,
    ),
    *refused(
        "the gradients of all weights reach the optimizer",
        "drop it",
        "--moe-router-freeze-gate",
        "--only-train-params-name-list V...",
        "--freeze-params-name-list V...",
        is_megatron=True,
    ),
    *refused(
        _NO_LAYER,
        _OTHER_MODEL,
        "--use-gated-attention",
        "--post-self-attn-layernorm",
        "--post-mlp-layernorm",
        "--squared-relu",
        "--hybrid-override-pattern V",
        "--hybrid-attention-ratio V",
        "--hybrid-mlp-ratio V",
        "--window-size V",
        accepted_if=_trains_any_layer,
        accepted_why="the layers are those of --hf-checkpoint",
        is_megatron=True,
    ),
    *refused(
        _NO_LAYER,
        _OTHER_MODEL,
        "--no-activation-func-clamp-shared-expert",
        "--dsv4-compress-ratios V...",
        "--dsv4-compress-rope-theta V",
        "--dsv4-hc-mult V",
        "--dsv4-hc-sinkhorn-iters V",
        "--dsv4-impl V",
        "--dsv4-n-hash-layers V",
        "--dsv4-o-groups V",
        "--dsv4-o-lora-rank V",
        "--dsv4-window-size V",
        is_megatron=True,
    ),
]

MEGATRON_SCRIPT_FLAGS = by_flag([*_SPEED, *_MODEL, *_STAGES, *_REFUSED])
