"""DeepSeek-V3 and R1, and Kimi-K2: latent attention, and sigmoid routing after the first layers."""

from miles.models.base import (
    Binding,
    Config,
    Replicated,
    Shape,
    Split,
    TensorLayout,
    check_sigmoid_router,
    refusal,
    sigmoid_experts,
    sigmoid_shape,
)
from miles.models.families.llama import Llama


class DeepseekV3(Llama):
    """Llama's layout outside of attention, which is latent (training/megatron/layers.py)."""

    can_be_bridged = False

    def check(self, config: Config) -> None:
        """Raise ``ValueError`` for a setting of ``config`` that the layers do not compute."""
        super().check(config)
        check_sigmoid_router(config)
        if not config.get("rope_interleave", True):
            raise refusal("rope_interleave false", "--train-backend megatron rotates neighbouring numbers only")
        heads, keys = config["num_attention_heads"], config.get("num_key_value_heads")
        if keys not in (None, heads):
            raise refusal(f"num_key_value_heads {keys}", f"latent attention has a key for each of the {heads} heads")
        rope = _rope(config)
        if rope["rope_type"] not in ("default", "yarn"):
            rule = f"for {self.model_type} --train-backend megatron computes default and yarn"
            raise refusal(f"rope_type {rope['rope_type']}", rule)
        if rope.get("attention_factor") is not None:
            rule = "--train-backend megatron derives it from mscale and mscale_all_dim"
            raise refusal(f"attention_factor {rope['attention_factor']}", rule)
        if rope.get("mscale_all_dim") and not rope.get("mscale"):
            raise refusal("mscale_all_dim without mscale", "--train-backend megatron computes both or none")

    def shape(self, config: Config) -> Shape:
        """Return the fields of Megatron's ``MLATransformerConfig`` that ``config`` determines."""
        return {
            **super().shape(config),
            "num_query_groups": config["num_attention_heads"],
            "kv_channels": config["qk_nope_head_dim"],  # as launch scripts have it; the widths below count
            "qk_layernorm": True,
            "multi_latent_attention": True,
            "q_lora_rank": config.get("q_lora_rank"),
            "kv_lora_rank": config["kv_lora_rank"],
            "qk_head_dim": config["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
            "v_head_dim": config["v_head_dim"],
            **_rope_shape(config),
            **sigmoid_shape(config, self.has_experts(config)),
        }

    def has_experts(self, config: Config) -> list[int]:
        """Return a 1 for each layer with experts, and a 0 for each dense one."""
        dense = config["first_k_dense_replace"]
        return [int(layer >= dense) for layer in range(config["num_hidden_layers"])]

    def layer(self, shape: Shape) -> dict[str, Binding]:
        """Return the parameters of a decoder layer, dense or with experts, both names relative to it."""
        attention: dict[str, tuple[TensorLayout, str]] = {
            "linear_q_proj": (Split(0), "q_proj"),
            "linear_q_down_proj": (Replicated(), "q_a_proj"),
            "q_layernorm": (Replicated(), "q_a_layernorm"),
            "linear_q_up_proj": (Split(0), "q_b_proj"),
            "linear_kv_down_proj": (Replicated(), "kv_a_proj_with_mqa"),
            "kv_layernorm": (Replicated(), "kv_a_layernorm"),
            "linear_kv_up_proj": (Split(0), "kv_b_proj"),
            "linear_proj": (Split(1), "o_proj"),
        }
        latent = {
            f"self_attention.{name}.weight": Binding(layout, (f"self_attn.{hf_name}.weight",))
            for name, (layout, hf_name) in attention.items()
        }
        return {**super().layer(shape), **latent, **sigmoid_experts()}


def _rope(config: Config) -> Config:
    """Return the settings of the rotary embedding, in the older form of a config too."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_type": parameters.get("type", "default"), **parameters}


def _rope_shape(config: Config) -> Shape:
    rope = _rope(config)
    if rope["rope_type"] == "default":
        return {"rope_type": "rope"}
    scales = bool(rope.get("mscale_all_dim"))  # transformers reads mscale only with it
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(rope["factor"]),
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "mscale": float(rope["mscale"]) if scales else 1.0,
        "mscale_all_dim": float(rope["mscale_all_dim"]) if scales else 0.0,
    }


CONVERTED = (DeepseekV3("deepseek_v3"), DeepseekV3("kimi_k2"))
