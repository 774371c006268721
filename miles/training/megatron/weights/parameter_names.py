"""Which Hugging Face tensors a Megatron parameter holds, by its name in the whole model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from miles.training.megatron.weights.tensor_layouts import (
    GateUp,
    QueryKeyValue,
    Replicated,
    Split,
    SwappedColumns,
    TensorLayout,
    Vocabulary,
)

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
# Of heads of multi-token prediction, as the checkpoints of MiMo-7B, a Qwen2 with such heads, name and order them: there
# the hidden state comes first in the projection, in Megatron the embedding.
MTP_HF = "model.mtp_layers."
MTP_OWN: dict[str, tuple[str, TensorLayout]] = {
    "enorm.weight": ("token_layernorm.weight", Replicated()),
    "hnorm.weight": ("hidden_layernorm.weight", Replicated()),
    "eh_proj.weight": ("input_proj.weight", SwappedColumns()),
    "final_layernorm.weight": ("final_layernorm.weight", Replicated()),
}


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
        of_head = re.fullmatch(r"mtp\.layers\.(\d+)\.(?:(?:transformer|mtp_model)_layer\.)?(.*)", name)
        if of_head:
            return self._of_head(of_head[1], of_head[2])
        for pattern, make in self._patterns:
            match = re.fullmatch(pattern, name)
            if match:
                return make(*match.groups())  # type: ignore[call-arg]
        raise AssertionError(f"{name} has no Hugging Face name")

    def _of_head(self, number: str, rest: str) -> Binding:
        if rest in MTP_OWN:
            hf_name, layout = MTP_OWN[rest]
            return Binding((f"{MTP_HF}{number}.{hf_name}",), layout)
        like = self.binding(f"decoder.layers.{number}.{rest}")
        return replace(like, hf_names=tuple(n.replace("model.layers.", MTP_HF, 1) for n in like.hf_names))


def is_of_head(hf_name: str) -> bool:
    """Whether a Hugging Face tensor belongs to a head of multi-token prediction."""
    return hf_name.startswith(MTP_HF)


def _layer(rest: str) -> str:
    return r"decoder\.layers\.(\d+)\." + rest


def _binding(layout: TensorLayout, *templates: str, is_expert: bool = False) -> Callable[..., Binding]:
    def make(*numbers: str) -> Binding:
        return Binding(tuple(template.format(*numbers) for template in templates), layout, is_expert)

    return make


def global_name(name: str, first_layer: int, first_expert: int) -> str:
    """The local name ``decoder.layers.0…`` with the numbers that layer and expert have in the whole model."""
    name = re.sub(r"(?<=decoder\.layers\.)\d+", lambda match: str(int(match[0]) + first_layer), name)
    return re.sub(r"(?<=local_experts\.)\d+", lambda match: str(int(match[0]) + first_expert), name)
