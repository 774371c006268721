"""Builds Megatron's configuration objects from the flags that they depend on and the model's shape."""

from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from miles.config.megatron.rules import TRIED, Overrides
from miles.config.megatron.settings import MegatronArguments
from miles.config.optimizer import OptimizerArguments


def transformer_config(
    sizes: MegatronArguments,
    overrides: Overrides,
    shape: dict[str, Any],
    dtype: torch.dtype,
    *,
    gradient_checkpointing: bool,
    per_token_loss: bool,
    deterministic: bool = False,
) -> TransformerConfig:
    """Return the configuration of a model.

    Args:
        sizes: How ranks share the model.
        overrides: The fields that flags set.
        shape: The fields that the model's Hugging Face config determines (``WeightConverter.shape``).
        dtype: The dtype of parameters and activations.
        gradient_checkpointing: Whether activations are recomputed in the backward pass.
        per_token_loss: Megatron's ``calculate_per_token_loss`` (runner.py).
        deterministic: Megatron's ``deterministic_mode``.
    """
    experts: dict[str, Any] = {}
    if "num_moe_experts" in shape:
        experts = {
            "moe_router_load_balancing_type": "none",  # moe.py computes the losses
            "expert_model_parallel_size": sizes.expert_model_parallel_size,
            "expert_tensor_parallel_size": sizes.expert_tensor_parallel_size,
            "moe_router_bias_update_rate": 0.0,  # biases of experts stay as in the checkpoint
        }
    of_model = {"activation_func": F.silu} | shape | experts
    kind = TransformerConfig
    if shape.get("multi_latent_attention"):
        # With multi_latent_attention, GPTModel leaves the rotary angles to Megatron's own layer; layers.py gets them.
        kind, of_model = MLATransformerConfig, of_model | {"multi_latent_attention": False}
    values = _recomputation(gradient_checkpointing, overrides) | _fields_of(overrides, TransformerConfig)
    chunks = sizes.chunks(shape["num_layers"])
    return kind(
        **of_model,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        tensor_model_parallel_size=sizes.tensor_model_parallel_size,
        pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
        num_layers_in_first_pipeline_stage=sizes.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=sizes.decoder_last_pipeline_num_layers,
        sequence_parallel=sizes.sequence_parallel,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Micro-batches differ in length: stages send each other the shape first.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the other one does not accept them; checked for dense models too
        calculate_per_token_loss=per_token_loss,
        deterministic_mode=deterministic,
        # Every weight is read from the checkpoint, so initialization does nothing. It is not switched off
        # (``perform_initialization``): it also sets the marks of tensor parallel that the gradient norm reads.
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        **{name: value for name, value in values.items() if name not in of_model},  # a flag may repeat the model's
    )


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _fields_of(overrides: Overrides, config: type) -> dict[str, Any]:
    """Return the fields of ``config`` that flags set, without the fields that the model or this file sets."""
    names = {field.name for field in fields(config)} & set(TRIED)
    return {name: value for name, value in overrides if name in names}


def _recomputation(gradient_checkpointing: bool, overrides: Overrides) -> dict[str, Any]:
    """Return the fields that recompute every layer on its own, if either flag asks for it. Megatron needs all three."""
    if not (gradient_checkpointing or "recompute_granularity" in dict(overrides)):
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def ddp_config(sizes: MegatronArguments, overrides: Overrides) -> DistributedDataParallelConfig:
    """Return the configuration of gradient buffers: accumulated and reduced in fp32, whatever the model's dtype."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=sizes.divides_optimizer,
        **_fields_of(overrides, DistributedDataParallelConfig),
    )


def optimizer_config(
    arguments: OptimizerArguments, sizes: MegatronArguments, dtype: torch.dtype, device: torch.device
) -> OptimizerConfig:
    """Return the configuration of AdamW with fp32 master weights. The rate follows training/optimizer.py.

    On CPU ``--optimizer-cpu-offload`` changes nothing: the state is in host memory.
    """
    offload: dict[str, Any] = {}
    if sizes.optimizer_cpu_offload and device.type == "cuda":
        offload = {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": sizes.optimizer_offload_fraction,
            "overlap_cpu_optimizer_d2h_h2d": sizes.overlap_cpu_optimizer_d2h_h2d,
        }
    config = OptimizerConfig(
        **offload,
        optimizer="adam",
        lr=arguments.lr,
        weight_decay=arguments.weight_decay,
        adam_beta1=arguments.adam_beta1,
        adam_beta2=arguments.adam_beta2,
        adam_eps=arguments.adam_eps,
        clip_grad=arguments.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=sizes.divides_optimizer,
    )
    if offload:
        # Otherwise a copy of the fp32 weights stays on the GPU (optimizer/distrib_optimizer.py,
        # _build_model_and_main_param_groups). All of its dtypes are fp32 by default. Set here, because the
        # configuration compares the release of Transformer Engine when it is made, which fails without it.
        config.use_precision_aware_optimizer = True
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    return config
