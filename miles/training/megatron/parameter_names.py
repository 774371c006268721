"""Which Hugging Face tensors a Megatron parameter holds, by its name in the whole model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles.training.megatron.tensor_layouts import GateUp, QueryKeyValue, Replicated, Split, TensorLayout, Vocabulary

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Binding:
    """One parameter: the Hugging Face tensors in it, in the layout's order, and whether it is an expert's."""

    hf_names: tuple[str, ...]
    layout: TensorLayout
    is_expert: bool = False


class ParameterNames:
    """Reads the names of one model. ``config`` is its Hugging Face config as a dictionary."""

    def __init__(self, config: dict[str, Any], shape: dict[str, Any]) -> None:
        self.tied = bool(config.get("tie_word_embeddings"))
        qkv = QueryKeyValue(shape["num_attention_heads"], shape["num_query_groups"], shape["kv_channels"])
        attention, mlp, expert = (f"model.layers.{{0}}.{part}" for part in ("self_attn", "mlp", "mlp.experts.{1}"))
        vocabulary = Vocabulary(config["vocab_size"])
        self._patterns: list[tuple[str, Callable[[str], Binding]]] = [
            (EMBEDDING, _binding(vocabulary, "model.embed_tokens.weight")),
            (HEAD, _binding(vocabulary, "model.embed_tokens.weight" if self.tied else "lm_head.weight")),
            ("decoder.final_layernorm.weight", _binding(Replicated(), "model.norm.weight")),
            (_layer("input_layernorm.weight"), _binding(Replicated(), "model.layers.{0}.input_layernorm.weight")),
            (
                _layer("pre_mlp_layernorm.weight"),
                _binding(Replicated(), "model.layers.{0}.post_attention_layernorm.weight"),
            ),
            (
                _layer("self_attention.linear_qkv.(weight|bias)"),
                _binding(qkv, *(f"{attention}.{name}_proj.{{1}}" for name in "qkv")),
            ),
            (_layer("self_attention.linear_proj.weight"), _binding(Split(1), f"{attention}.o_proj.weight")),
            (
                _layer("self_attention.([qk])_layernorm.weight"),
                _binding(Replicated(), f"{attention}.{{1}}_norm.weight"),
            ),
            (
                _layer("mlp.linear_fc1.weight"),
                _binding(GateUp(), f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
            ),
            (_layer("mlp.linear_fc2.weight"), _binding(Split(1), f"{mlp}.down_proj.weight")),
            (_layer("mlp.router.weight"), _binding(Replicated(), f"{mlp}.gate.weight")),
            (
                _layer(r"mlp.experts.local_experts.(\d+).linear_fc1.weight"),
                _binding(GateUp(), f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight", is_expert=True),
            ),
            (
                _layer(r"mlp.experts.local_experts.(\d+).linear_fc2.weight"),
                _binding(Split(1), f"{expert}.down_proj.weight", is_expert=True),
            ),
        ]

    def binding(self, name: str) -> Binding:
        """Of the parameter ``name``, with layer and expert numbers of the whole model."""
        for pattern, make in self._patterns:
            match = re.fullmatch(pattern, name)
            if match:
                return make(*match.groups())  # type: ignore[call-arg]
        raise AssertionError(f"{name} has no Hugging Face name")


def _layer(rest: str) -> str:
    return r"decoder\.layers\.(\d+)\." + rest


def _binding(layout: TensorLayout, *templates: str, is_expert: bool = False) -> Callable[..., Binding]:
    def make(*numbers: str) -> Binding:
        return Binding(tuple(template.format(*numbers) for template in templates), layout, is_expert)

    return make


def global_name(name: str, first_layer: int, first_expert: int) -> str:
    """The local name ``decoder.layers.0…`` with the numbers that layer and expert have in the whole model."""
    name = re.sub(r"(?<=layers\.)\d+", lambda match: str(int(match[0]) + first_layer), name)
    return re.sub(r"(?<=local_experts\.)\d+", lambda match: str(int(match[0]) + first_expert), name)
