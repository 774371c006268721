"""Llama, Qwen2 and Qwen3: dense decoders with a gated MLP.

Their checkpoints name and lay out tensors alike; Qwen2 has biases on queries, keys and values, Qwen3 norms on the heads
of queries and keys.
"""

from dataclasses import dataclass

from miles.models.base import (
    EMBEDDING,
    EMBEDDING_HF,
    HEAD,
    HEAD_HF,
    Binding,
    Config,
    ConvertedFamily,
    GateUp,
    ParameterNames,
    QueryKeyValue,
    Replicated,
    Shape,
    Split,
    Vocabulary,
)


@dataclass(frozen=True)
class Llama(ConvertedFamily):
    """One of the three; the fields hold their differences."""

    has_qk_norm: bool = False

    def shape(self, config: Config) -> Shape:
        """Return the fields of Megatron's ``TransformerConfig`` that ``config`` determines."""
        heads = config["num_attention_heads"]
        return {
            "num_layers": config["num_hidden_layers"],
            "hidden_size": config["hidden_size"],
            "ffn_hidden_size": config["intermediate_size"],
            "num_attention_heads": heads,
            "num_query_groups": config.get("num_key_value_heads") or heads,
            "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
            "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "add_qkv_bias": self.has_qkv_bias,
            "qk_layernorm": self.has_qk_norm,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }

    def parameters(self, config: Config, shape: Shape) -> ParameterNames:
        """Return which Hugging Face tensors each parameter of Megatron's model holds, and their layout."""
        tied = bool(config.get("tie_word_embeddings"))
        vocabulary = Vocabulary(config["vocab_size"])
        outside = {
            EMBEDDING: Binding(vocabulary, (EMBEDDING_HF,)),
            HEAD: Binding(vocabulary, (EMBEDDING_HF if tied else HEAD_HF,)),
            "decoder.final_layernorm.weight": Binding(Replicated(), ("model.norm.weight",)),
        }
        return ParameterNames(outside, self.layer(shape), tied)

    def layer(self, shape: Shape) -> dict[str, Binding]:
        """Return the parameters of a decoder layer, both names relative to it."""
        qkv = QueryKeyValue(shape["num_attention_heads"], shape["num_query_groups"], shape["kv_channels"])
        return {
            "input_layernorm.weight": Binding(Replicated(), ("input_layernorm.weight",)),
            "self_attention.linear_qkv.weight": Binding(qkv, tuple(f"self_attn.{x}_proj.weight" for x in "qkv")),
            "self_attention.linear_qkv.bias": Binding(qkv, tuple(f"self_attn.{x}_proj.bias" for x in "qkv")),
            "self_attention.q_layernorm.weight": Binding(Replicated(), ("self_attn.q_norm.weight",)),
            "self_attention.k_layernorm.weight": Binding(Replicated(), ("self_attn.k_norm.weight",)),
            "self_attention.linear_proj.weight": Binding(Split(1), ("self_attn.o_proj.weight",)),
            "pre_mlp_layernorm.weight": Binding(Replicated(), ("post_attention_layernorm.weight",)),
            "mlp.linear_fc1.weight": Binding(GateUp(), ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
            "mlp.linear_fc2.weight": Binding(Split(1), ("mlp.down_proj.weight",)),
        }


CONVERTED = (Llama("llama"), Llama("qwen2", has_qkv_bias=True), Llama("qwen3", has_qk_norm=True))
