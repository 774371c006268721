"""Describe a family of models: the methods that each family implements."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from miles.models.packing import WITHOUT_QUANTIZATION, is_quantized

if TYPE_CHECKING:
    from torch import Tensor


# Convert Hugging Face tensors to Megatron parameters, and cut these over the tensor-parallel ranks.
#
# Layouts only move numbers: both directions are exact, and each is the inverse of the other.


class TensorLayout(Protocol):
    """Both directions take and return Hugging Face tensors in the order of their names in a ``Binding``."""

    def from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Return the shard of tensor-parallel rank ``rank`` of ``size``, from whole Hugging Face tensors."""

    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return whole Hugging Face tensors from the shards of all ranks, in order."""


@dataclass(frozen=True)
class Replicated:
    """Every rank holds all of it: norms, the router."""

    def from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Return the tensor."""
        return tensors[0]

    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the first rank's."""
        return [shards[0]]


@dataclass(frozen=True)
class Split:
    """Cut along ``dim``: rows of a column-parallel weight (0), columns of a row-parallel one (1)."""

    dim: int

    def from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Return the rank's equal part."""
        return tensors[0].chunk(size, self.dim)[rank]

    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Join the parts."""
        return [_join(shards, self.dim)]


@dataclass(frozen=True)
class SwappedColumns:
    """Cut by rows, with the two halves of the columns in the other order."""

    def from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Return the rank's rows, halves swapped."""
        first, second = tensors[0].chunk(size)[rank].chunk(2, 1)
        return _join([second, first], 1)

    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Join the rows and swap the halves back."""
        first, second = _join(shards).chunk(2, 1)
        return [_join([second, first], 1)]


@dataclass(frozen=True)
class Vocabulary:
    """Rows of the embedding or the head, one per token of ``tokens``, padded with zeros to a multiple of the ranks."""

    tokens: int

    def from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Return the rank's rows, with its part of the padding."""
        (whole,) = tensors
        rows = -(-self.tokens // size)
        shard = whole[rank * rows : (rank + 1) * rows]
        return _join([shard, shard.new_zeros(rows - len(shard), whole.shape[1])])

    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Join the rows and drop the padding."""
        return [_join(shards)[: self.tokens]]


@dataclass(frozen=True)
class GateUp:
    """The first matrix of a gated MLP: each rank has its rows of the gate, then its rows of the up projection."""

    def from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Return the rank's rows of both."""
        return _join([tensor.chunk(size)[rank] for tensor in tensors])

    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return gate and up projection."""
        halves = [shard.chunk(2) for shard in shards]
        return [_join([gate for gate, _ in halves]), _join([up for _, up in halves])]


@dataclass(frozen=True)
class QueryKeyValue:
    """The first matrix of attention, or its bias: for each key head its query heads, then the key, then the value.

    Ranks hold whole groups if there are at least as many groups as ranks, and equal parts of the rows otherwise.
    """

    heads: int
    groups: int
    width: int

    def from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Return the rank's rows of query, key and value, interleaved by group."""
        by_group = [tensor.reshape(self.groups, -1, *tensor.shape[1:]) for tensor in tensors]
        return _join(by_group, 1).flatten(0, 1).chunk(size)[rank]

    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return query, key and value."""
        whole = _join(shards)
        by_group = whole.reshape(self.groups, -1, *whole.shape[1:])
        rows = [self.heads // self.groups * self.width, self.width, self.width]
        parts: Sequence[Tensor] = by_group.split(rows, 1)
        return [part.flatten(0, 1) for part in parts]


def _join(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch  # not at the top: validation reads the families, and takes no torch

    return torch.cat(list(tensors), dim)


# Find the Hugging Face tensors that a Megatron parameter holds, by its name in the whole model.


EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
EMBEDDING_HF, HEAD_HF = "model.embed_tokens.weight", "lm_head.weight"
LAYERS_HF, MTP_HF = "model.layers.", "model.mtp_layers."


@dataclass(frozen=True)
class Binding:
    """One parameter: its layout, the Hugging Face tensors in the order of the layout, and whether it is an expert's.

    ``*`` in a family's names is the number of an expert. A buffer is fp32 whatever the dtype of the rest, and has no
    gradient.
    """

    layout: TensorLayout
    hf_names: tuple[str, ...]
    is_expert: bool = False
    is_buffer: bool = False


# The parameters of a head of multi-token prediction around its decoder layer, as the checkpoints of MiMo-7B (a Qwen2
# with such heads) name and order it: there the hidden state comes first in the projection, in Megatron the embedding.
MTP_OWN = {
    "enorm.weight": Binding(Replicated(), ("token_layernorm.weight",)),
    "hnorm.weight": Binding(Replicated(), ("hidden_layernorm.weight",)),
    "eh_proj.weight": Binding(SwappedColumns(), ("input_proj.weight",)),
    "final_layernorm.weight": Binding(Replicated(), ("final_layernorm.weight",)),
}


@dataclass(frozen=True)
class ParameterNames:
    """The parameters of one model.

    ``outside`` has the parameters outside the decoder's layers by Megatron's name. ``layer`` has the parameters of a
    layer, both names relative to it. Heads of multi-token prediction contain such a layer.
    """

    outside: Mapping[str, Binding]
    layer: Mapping[str, Binding]
    tied: bool  # the output head is the embedding

    def binding(self, name: str) -> Binding:
        """Return the binding of parameter ``name``, whose layer and expert numbers count in the whole model."""
        if name in self.outside:
            return self.outside[name]
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
        if match:
            return self._of_layer(f"{LAYERS_HF}{match[1]}.", match[2])
        match = re.fullmatch(r"mtp\.layers\.(\d+)\.(?:(?:transformer|mtp_model)_layer\.)?(.*)", name)
        assert match, f"{name} has no Hugging Face name"
        return self._of_layer(f"{MTP_HF}{match[1]}.", match[2], MTP_OWN)

    def _of_layer(self, prefix: str, rest: str, special: Mapping[str, Binding] | None = None) -> Binding:
        number = r"(?<=\.)\d+(?=\.)"
        experts = re.findall(number, rest)
        template = re.sub(number, "*", rest)
        entry = (special or {}).get(template) or self.layer.get(template)
        assert entry, f"{rest} of a layer has no Hugging Face name"
        return replace(entry, hf_names=tuple(prefix + name.replace("*", *experts or "*") for name in entry.hf_names))


def is_of_head(hf_name: str) -> bool:
    """Return whether a Hugging Face tensor belongs to a head of multi-token prediction."""
    return hf_name.startswith(MTP_HF)


Config: TypeAlias = dict[str, Any]  # a config.json
Shape: TypeAlias = dict[str, Any]  # fields of Megatron's TransformerConfig

HEADS_IN_CONFIG = "num_nextn_predict_layers"  # the setting that states that the checkpoint has heads of MTP

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

# (setting of a config, whether miles computes a value of it, what miles computes)
_COMPUTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("mlp_bias", lambda value: not value, "MLPs without bias"),
    ("attention_dropout", lambda value: not value, "attention without dropout"),
    ("final_logit_softcapping", lambda value: value is None, "plain logits"),
    ("logits_scaling", lambda value: value in (None, 1, 1.0), "plain logits"),
    ("logit_scale", lambda value: value in (None, 1, 1.0), "plain logits"),
)


def refusal(
    feature: str, rule: str, what_to_do: str = "choose another model, or --train-backend fsdp for others"
) -> ValueError:
    """Return the error for a model whose config has ``feature``."""
    return ValueError(f"--hf-checkpoint: its config has {feature}, and {rule}; {what_to_do}")


@dataclass(frozen=True)
class Family:
    """The models of one ``model_type``."""

    can_be_bridged: ClassVar[bool] = True  # compared with transformers through Megatron-Bridge as well

    model_type: str
    activation: str = "silu"  # of the MLPs, as configs name it
    has_qkv_bias: bool = False
    rotates_part: bool = False  # of each head; the config states which, and without that half of it

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
        if not self.rotates_part:
            return 1.0
        rope = {"partial_rotary_factor": 0.5} | config | (config.get("rope_parameters") or {})  # transformers' default
        return float(rope["partial_rotary_factor"])


class ConvertedFamily(Family, ABC):
    """Models whose weights miles moves itself (``--megatron-to-hf-mode raw``)."""

    @abstractmethod
    def shape(self, config: Config) -> Shape:
        """Return the fields of Megatron's ``TransformerConfig`` that ``config`` determines."""

    @abstractmethod
    def parameters(self, config: Config, shape: Shape) -> ParameterNames:
        """Return which Hugging Face tensors each parameter of Megatron's model holds, and their layout."""


# Layers with experts: the part that families share. A routed expert is its own gated MLP tensors.
#
# Routing by sigmoid scores follows DeepSeek-V3 (arXiv 2412.19437 §2.1.2). A bias per expert, which no gradient reaches,
# is added to the scores when experts are chosen, within the groups of experts with the highest scores. The weights of
# the chosen are their scores without bias, normalized and scaled. All tokens also go through shared experts.


def routed_experts() -> dict[str, Binding]:
    """Return the router's matrix and the experts of a layer."""
    experts = "mlp.experts.local_experts.*"
    hf_gate_up = ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight")
    return {
        "mlp.router.weight": Binding(Replicated(), ("mlp.gate.weight",)),
        f"{experts}.linear_fc1.weight": Binding(GateUp(), hf_gate_up, is_expert=True),
        f"{experts}.linear_fc2.weight": Binding(Split(1), ("mlp.experts.*.down_proj.weight",), is_expert=True),
    }


def sigmoid_experts() -> dict[str, Binding]:
    """Return router, experts and shared experts of a layer."""
    shared = "mlp.shared_experts"
    gate_up = (f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight")
    return routed_experts() | {
        "mlp.router.expert_bias": Binding(Replicated(), ("mlp.gate.e_score_correction_bias",), is_buffer=True),
        f"{shared}.linear_fc1.weight": Binding(GateUp(), gate_up),
        f"{shared}.linear_fc2.weight": Binding(Split(1), (f"{shared}.down_proj.weight",)),
    }


def sigmoid_shape(config: Config, has_experts: list[int]) -> Shape:
    """Return the fields of Megatron's ``TransformerConfig``. ``has_experts`` has a 1 for each layer with experts."""
    return {
        "num_moe_experts": config["n_routed_experts"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_pre_softmax": True,  # as launch scripts have it; without effect on sigmoid scores
        "moe_layer_freq": has_experts,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",  # transformers computes scores in fp32 whatever the model's dtype
        "moe_router_num_groups": config["n_group"],
        "moe_router_group_topk": config["topk_group"],
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config["n_shared_experts"],
    }


def check_sigmoid_router(config: Config) -> None:
    """Raise ``ValueError`` for a setting of the router that Megatron computes in another way than transformers."""
    topk, groups, chosen_groups = (config[name] for name in ("num_experts_per_tok", "n_group", "topk_group"))
    if config.get("scoring_func", "sigmoid") != "sigmoid":
        raise _refusal(config, "scoring_func", "sigmoid scores")
    if bool(config.get("norm_topk_prob", True)) != (topk > 1):
        raise _refusal(config, "norm_topk_prob", "weights that are normalized over two experts or more")
    if not config["n_shared_experts"]:
        raise _refusal(config, "n_shared_experts", "layers with shared experts")
    # transformers ranks groups by their two best experts, megatron-core by num_experts_per_tok / topk_group.
    if chosen_groups < groups and topk // chosen_groups != 2:
        what = f"groups of experts with num_experts_per_tok twice topk_group (here {chosen_groups})"
        raise _refusal(config, "num_experts_per_tok", what)


def _refusal(config: Config, name: str, what: str) -> ValueError:
    value: Any = config.get(name)
    return refusal(f"{name} {value}", f"--train-backend megatron computes {what} only")
