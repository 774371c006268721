"""Qwen3-MoE: Qwen3 whose layers, or some of them, have experts instead of the MLP."""

from miles.models.base import Binding, Config, Shape, routed_experts
from miles.models.families.llama import Llama


class Qwen3Moe(Llama):
    """Llama's layout, with a router and experts."""

    def shape(self, config: Config) -> Shape:
        """Return the fields of Megatron's ``TransformerConfig`` that ``config`` determines."""
        dense = config.get("mlp_only_layers") or []
        step = config.get("decoder_sparse_step", 1)
        layers = range(config["num_hidden_layers"])
        return super().shape(config) | {
            "num_moe_experts": config.get("num_experts", config.get("num_local_experts")),
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            "moe_router_topk": config["num_experts_per_tok"],
            # Softmax over the chosen experts equals softmax over all, renormalized; without renormalizing it does not.
            "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
            "moe_layer_freq": [int(i not in dense and (i + 1) % step == 0) for i in layers],
        }

    def layer(self, shape: Shape) -> dict[str, Binding]:
        """Return the parameters of a decoder layer, dense or with experts, both names relative to it."""
        return super().layer(shape) | routed_experts()


CONVERTED = (Qwen3Moe("qwen3_moe", has_qk_norm=True),)
