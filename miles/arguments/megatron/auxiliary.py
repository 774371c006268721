"""The rules of the losses that arise inside the model: the routers', and multi-token prediction."""

from __future__ import annotations

from typing import Any

from miles.arguments.megatron.settings import MegatronArguments
from miles.flags import at_least, refuse, refuse_ignored, require
from miles.model_families.base import HEADS_IN_CONFIG

BALANCED = ("aux_loss", "seq_aux_loss", "none")
NOT_BALANCED = {
    "global_aux_loss": "its counts add up from one micro-batch to the next, so that it depends on their order",
    "sinkhorn": "it routes another way in training than in the engine",
}


def check_auxiliary(sizes: MegatronArguments) -> None:
    """What holds for every model. Raises ``ValueError`` naming flag, value, rule and way out."""
    at_least(sizes, 0, "moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_loss_scaling_factor")
    at_least(sizes, 1, "mtp_num_layers")
    kind = sizes.moe_router_load_balancing_type
    if kind not in BALANCED:
        rule = NOT_BALANCED.get(kind, "there is no such loss")
        refuse("moe_router_load_balancing_type", kind, rule, f"give one of {', '.join(BALANCED)}")
    if kind == "none":
        refuse_ignored(sizes, ["moe_aux_loss_coeff"], "with --moe-router-load-balancing-type none", "give aux_loss")
    elif not sizes.moe_aux_loss_coeff:
        way_out = "give --moe-aux-loss-coeff a number above 0"
        refuse_ignored(sizes, ["moe_router_load_balancing_type"], "with --moe-aux-loss-coeff 0", way_out)
    if sizes.enable_mtp_training:
        require("mtp_num_layers", sizes.mtp_num_layers, "--enable-mtp-training trains that many heads")
    else:
        names = ["mtp_num_layers", "mtp_loss_scaling_factor"]
        refuse_ignored(sizes, names, "without --enable-mtp-training", "add that flag")


def check_auxiliary_of_model(sizes: MegatronArguments, config: dict[str, Any], has_experts: bool) -> None:
    """What the model of this Hugging Face config can be trained with."""
    if not has_experts:
        names = ["moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"]
        refuse_ignored(sizes, names, "by a model without experts", "train one that has them")
    heads = config.get(HEADS_IN_CONFIG) or 0
    if sizes.mtp_heads and heads not in (0, sizes.mtp_heads):
        rule = f"contradicts --hf-checkpoint, whose config gives {HEADS_IN_CONFIG} {heads}"
        refuse("mtp_num_layers", sizes.mtp_heads, rule, f"give {heads}")
    if sizes.mtp_heads and config.get("tie_word_embeddings") and sizes.pipeline_model_parallel_size > 1:
        rule = (
            f"with --pipeline-model-parallel-size {sizes.pipeline_model_parallel_size}: megatron-core has three copies "
            "of a tied embedding then, of which it updates two"
        )
        refuse("mtp_num_layers", sizes.mtp_heads, rule, "give --pipeline-model-parallel-size 1")
