"""Check that ``--lora-rank`` fits the model and the other flags of the Megatron backend."""

from __future__ import annotations

from typing import Any

from miles.arguments.lora import LoraArguments, refuse_projections_of_experts
from miles.arguments.megatron.settings import MegatronArguments
from miles.flags import Errors


def check_adapter_flags(lora: LoraArguments, sizes: MegatronArguments, errors: Errors) -> None:
    """Check what does not depend on the model."""
    if not lora.trains_adapter:
        return
    if sizes.megatron_to_hf_mode == "bridge":
        rule = "with --megatron-to-hf-mode bridge: adapters are named by the converter of raw"
        errors.refuse("lora_rank", lora.lora_rank, rule, "drop --megatron-to-hf-mode")
    if sizes.mtp_heads:
        rule = "with --mtp-num-layers: the heads have no adapter, and would not learn"
        errors.refuse("lora_rank", lora.lora_rank, rule, "drop --mtp-num-layers and --enable-mtp-training")
    if sizes.has_router_loss:
        rule = "with a loss of the routers, whose weights an adapter leaves as they are"
        errors.refuse("lora_rank", lora.lora_rank, rule, "drop --moe-aux-loss-coeff and --moe-z-loss-coeff")


def check_adapter_with_model(lora: LoraArguments, model_type: str, shape: dict[str, Any], errors: Errors) -> None:
    """Check what the model determines.

    Args:
        lora: The section.
        model_type: As its config names it.
        shape: The model's shape in Megatron's terms.
        errors: Collects the refusal.
    """
    if not lora.trains_adapter:
        return
    if "num_moe_experts" in shape and errors.none_about("target_modules"):
        refuse_projections_of_experts(lora, errors)
    if shape.get("multi_latent_attention"):
        rule = f"the latent attention of a {model_type} gets no adapter with --train-backend megatron"
        errors.refuse("lora_rank", lora.lora_rank, rule, "use --train-backend fsdp")
