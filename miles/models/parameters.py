"""Find the Hugging Face tensors that a Megatron parameter holds, by its name in the whole model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from miles.models.tensor_layouts import Replicated, SwappedColumns, TensorLayout

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

    def _of_layer(self, prefix: str, rest: str, own: Mapping[str, Binding] | None = None) -> Binding:
        number = r"(?<=\.)\d+(?=\.)"
        experts = re.findall(number, rest)
        template = re.sub(number, "*", rest)
        found = (own or {}).get(template) or self.layer.get(template)
        assert found, f"{rest} of a layer has no Hugging Face name"
        return replace(found, hf_names=tuple(prefix + name.replace("*", *experts or "*") for name in found.hf_names))


def is_of_head(hf_name: str) -> bool:
    """Return whether a Hugging Face tensor belongs to a head of multi-token prediction."""
    return hf_name.startswith(MTP_HF)
