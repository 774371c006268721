"""What becomes of flags that set fields of Megatron's own dataclasses.

The shape of the model is the Hugging Face config's, and some fields are this backend's to set: a flag may say the same
again, as launch scripts do, and is an error where it says something else. The fields in ``TRIED`` are handed on. For
the rest the way is closed: megatron-core has them, and nothing here has shown that training with them is right.
"""

from __future__ import annotations

from typing import Any

from miles.model_families.base import EXPERT_FIELDS, LAYER_FIELDS

Given = tuple[tuple[str, Any], ...]

# As the backend sets them (training/megatron/model/transformer_config.py, layer_spec.py), and why.
FIXED: dict[str, tuple[Any, str]] = {
    "grad_reduce_in_fp32": (True, "gradients are accumulated and reduced in fp32"),
    "attention_softmax_in_fp32": (True, "the softmax of attention is computed in fp32"),
    "variable_seq_lengths": (True, "micro-batches differ in length"),
    "transformer_impl": ("local", "layers are Megatron's own"),
    "attention_backend": ("auto", "attention is miles' own"),
    "recompute_granularity": ("full", "recomputation is that of whole layers"),
    "recompute_method": ("uniform", "every layer is recomputed"),
    "recompute_num_layers": (1, "every layer is recomputed by itself"),
    "moe_token_dispatcher_type": ("alltoall", "the others take no micro-batches of differing length"),
    "rope_fusion": (False, "the rotary embedding is that of each token's own position"),
    "position_embedding_table": (False, "positions are rotary"),
    "use_rotary_position_embeddings": (True, "positions are rotary"),
}
TRIED = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "moe_router_dtype",
    "overlap_grad_reduce",
)


def check_overrides(given: Given, shape: dict[str, Any] | None, flags: dict[str, str]) -> None:
    """``shape`` is that of the model's config, None where it is not known yet; ``flags`` names each field's flag.

    Raises ``ValueError`` naming the flag, its value, and what contradicts it.
    """
    for name, value in given:
        flag = flags[name]
        shown = flag if isinstance(value, bool) else f"{flag} {_words(value)}"
        if shape is not None and name in shape:
            _must_be(value, shape[name], shown, f"--hf-checkpoint, whose config gives {name} {_words(shape[name])}")
        elif name in FIXED:
            fixed, why = FIXED[name]
            _must_be(value, fixed, shown, f"--train-backend megatron: {why}")
        elif name not in TRIED and (shape is not None or name not in SHAPE_FIELDS):
            raise ValueError(
                f"{shown}: megatron-core has this setting, but training with it has not been tested here, and what is "
                "not known to be right is not accepted; drop it"
            )


# The fields that a model's config determines: not known to be right or wrong before it is read.
SHAPE_FIELDS = {
    *LAYER_FIELDS,
    *EXPERT_FIELDS,
    "vocab_size",
    "untie_embeddings_and_output_weights",
    "rotary_base",
    "rotary_percent",
    "max_position_embeddings",
    "position_embedding_type",
    "group_query_attention",
}


def _must_be(value: Any, wanted: Any, shown: str, reason: str) -> None:
    found = value[0] if isinstance(value, list) and not isinstance(wanted, list) and len(value) == 1 else value
    if isinstance(wanted, list) and len(set(map(str, wanted))) == 1 and found in (wanted[0], [wanted[0]]):
        return
    if found != wanted:
        raise ValueError(f"{shown}: contradicts {reason}; drop it")


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
