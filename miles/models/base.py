"""Describe a family of models: the methods that each family implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from miles.models.packing import WITHOUT_QUANTIZATION, is_quantized
from miles.models.parameters import ParameterNames

Config: TypeAlias = dict[str, Any]  # a config.json
Shape: TypeAlias = dict[str, Any]  # fields of Megatron's TransformerConfig

HEADS_IN_CONFIG = "num_nextn_predict_layers"  # by which a config says that the checkpoint has heads of MTP

# Fields of ``TransformerConfig`` that a model's config determines: of every layer, and of layers with experts.
LAYER_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "layernorm_epsilon",
    "normalization",
    "layernorm_zero_centered_gamma",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "attention_dropout",
    "hidden_dropout",
)
EXPERT_FIELDS = (
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_layer_freq",
)

# (setting of a config, whether a value of it is computed, what is)
_COMPUTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("mlp_bias", lambda value: not value, "MLPs without bias"),
    ("attention_dropout", lambda value: not value, "attention without dropout"),
    ("final_logit_softcapping", lambda value: value is None, "plain logits"),
    ("logits_scaling", lambda value: value in (None, 1, 1.0), "plain logits"),
    ("logit_scale", lambda value: value in (None, 1, 1.0), "plain logits"),
)


def refusal(
    found: str, rule: str, what_to_do: str = "choose another model, or --train-backend fsdp for others"
) -> ValueError:
    """Return the error for a model whose config has ``found``."""
    return ValueError(f"--hf-checkpoint: its config has {found}, and {rule}; {what_to_do}")


@dataclass(frozen=True)
class Family:
    """The models of one ``model_type``."""

    can_be_bridged: ClassVar[bool] = True  # compared with transformers through Megatron-Bridge as well

    model_type: str
    activation: str = "silu"  # of the MLPs, as configs name it
    has_qkv_bias: bool = False

    def check(self, config: Config) -> None:
        """Raise ``ValueError`` for a setting of ``config`` that the layers do not compute."""
        if is_quantized(config):
            raise refusal("a quantization_config", "quantized weights are not trained", WITHOUT_QUANTIZATION)
        if config.get("hidden_act") not in (None, self.activation):
            rule = f"for {self.model_type} --train-backend megatron computes only {self.activation}"
            raise refusal(f"hidden_act {config['hidden_act']}", rule)
        window = self.sliding_window(config)
        if window:
            rule = "--train-backend megatron computes only full attention"
            what_to_do = "set it to null in config.json if no sequence will be longer, or give --train-backend fsdp"
            raise refusal(f"sliding_window {window}", rule, what_to_do)
        for name, is_computed, what in _COMPUTED:
            if not is_computed(config.get(name)):
                raise refusal(f"{name} {config[name]}", f"--train-backend megatron computes {what} only")
        if config.get("attention_bias") and not self.has_qkv_bias:
            raise refusal("attention_bias true", f"--train-backend megatron converts no bias of a {self.model_type}")

    def sliding_window(self, config: Config) -> int | None:
        """Return how many tokens back attention sees, or None if it sees all."""
        return config.get("sliding_window") if config.get("use_sliding_window") else None

    def rotated_share(self, config: Config) -> float:
        """Return the part of each attention head, from its beginning, that rotary embedding rotates."""
        return 1.0


class ConvertedFamily(Family, ABC):
    """Models whose weights miles moves itself (``--megatron-to-hf-mode raw``)."""

    @abstractmethod
    def shape(self, config: Config) -> Shape:
        """Return the fields of Megatron's ``TransformerConfig`` that ``config`` determines."""

    @abstractmethod
    def parameters(self, config: Config, shape: Shape) -> ParameterNames:
        """Return which Hugging Face tensors each parameter of Megatron's model holds, and in which layout."""
