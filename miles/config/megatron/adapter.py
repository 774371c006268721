"""Check that ``--lora-rank`` fits the model and the other flags of the Megatron backend."""

from __future__ import annotations

import re
from typing import Any

from miles.base.flags import Errors
from miles.config.lora import LoraArguments, is_in_experts, refuse_projections_of_experts, refuse_unknown_layers
from miles.config.megatron.settings import MegatronArguments
from miles.models.registry import converted_family

_LINEAR = re.compile(r"(?!.*experts).*\.linear_\w+\.weight")


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


def check_adapted_layers(lora: LoraArguments, config: dict[str, Any], shape: dict[str, Any], errors: Errors) -> None:
    """Check that the model with this Hugging Face config, and this shape, has the layers that flags name."""
    if not lora.trains_adapter or not errors.none_about("lora_rank"):
        return
    layer = converted_family(config).parameters(config, shape).layer
    names = (hf for name, binding in layer.items() if _LINEAR.fullmatch(name) for hf in binding.hf_names)
    known = {name.split(".")[-2] for name in names}
    shown = {name for name in known if not ("num_moe_experts" in shape and is_in_experts(name))}
    refuse_unknown_layers(lora, known, shown, config["model_type"], errors)
