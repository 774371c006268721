"""Every family that a file of ``families/`` defines, by ``model_type``."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from miles.models import families as folder
from miles.models.base import Config, ConvertedFamily, Family, Shape, refusal
from miles.models.packing import is_compared_by_test, model_type, why_not_trained


def families(kind: str) -> dict[str, Any]:
    """Return the entries that the files of this package list under ``kind``, by ``model_type``, in the files' order."""
    by_type: dict[str, Any] = {}
    for file in iter_modules(folder.__path__):
        for family in getattr(import_module(f"{folder.__name__}.{file.name}"), kind, ()):
            assert family.model_type not in by_type, f"{family.model_type} is defined twice"
            by_type[family.model_type] = family
    return by_type


CONVERTED: dict[str, ConvertedFamily] = families("CONVERTED")
BRIDGED: dict[str, Family] = families("BRIDGED")
FAMILIES: dict[str, Family] = {**CONVERTED, **BRIDGED}


def family_of(config: Config) -> Family:
    """Return the family of a model. Raises ``ValueError`` for one that ``--train-backend megatron`` does not know."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise refusal(f"model_type {kind}", _trained(), _elsewhere(config))
    return FAMILIES[kind]


def _elsewhere(config: Config) -> str:
    """Say what to do about a model that Megatron does not train: use FSDP, unless that refuses the model too."""
    if why_not_trained(config) is not None:
        return "choose another model"
    if is_compared_by_test(config):
        return f"give --train-backend fsdp, which trains a {model_type(config)}, and drop the flags of Megatron"
    return "choose another model, or give --train-backend fsdp, which trains those that transformers has"


def _trained() -> str:
    """Say which models Megatron trains."""
    bridged = ", ".join(kind for kind in _bridged() if kind not in CONVERTED)
    converted = ", ".join(CONVERTED)
    return f"--train-backend megatron trains {converted} and, with --megatron-to-hf-mode bridge, {bridged}"


def _bridged() -> list[str]:
    return [kind for kind, family in FAMILIES.items() if family.can_be_bridged]


def converted_family(config: Config) -> ConvertedFamily:
    """Return the family of a model whose weights miles moves itself.

    Raises ``ValueError`` for another model, and for a setting of this one that the layers do not compute.
    """
    kind = config.get("model_type")
    if kind in BRIDGED:
        what_to_do = f"add --megatron-to-hf-mode bridge, or {_elsewhere(config)}"
        raise refusal(f"model_type {kind}", "only Megatron-Bridge converts it", what_to_do)
    if kind not in CONVERTED:
        raise refusal(f"model_type {kind}", _trained(), _elsewhere(config))
    family = CONVERTED[kind]
    family.check(config)
    return family


def megatron_shape(config: Config) -> Shape:
    """Return the fields of Megatron's ``TransformerConfig`` that ``config`` determines.

    Raises ``ValueError`` as ``converted_family`` does.
    """
    return converted_family(config).shape(config)


def check_bridged(config: Config) -> None:
    """Check that the training of this model through Megatron-Bridge has been compared with transformers'.

    Raises ``ValueError`` for another, as far as its config tells.
    """
    family = family_of(config)
    if not family.can_be_bridged:
        rule = f"through Megatron-Bridge only {', '.join(_bridged())} have been compared with transformers"
        raise refusal(f"model_type {family.model_type}", rule, "drop --megatron-to-hf-mode bridge: miles converts it")
    if not any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ()):
        raise refusal(f"architectures {config.get('architectures')}", "Megatron-Bridge needs a …ForCausalLM there")
    family.check(config)


# Names that configurations of most families share, and Megatron's.
_COMMON = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "num_experts": "num_moe_experts",
    "n_routed_experts": "num_moe_experts",
}


def common_shape(config: Config) -> Shape:
    """Return the sizes of a model of any family by Megatron's names, as far as its configuration has them."""
    text = config.get("text_config") or config
    return {field: text[setting] for setting, field in _COMMON.items() if isinstance(text.get(setting), int)}


def vocabulary_shape(config: Config) -> Shape:
    """Return the arguments of Megatron's ``GPTModel`` besides ``TransformerConfig``: vocabulary, head and positions."""
    rope = config.get("rope_parameters") or {}
    return {
        "vocab_size": config["vocab_size"],
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "rotary_base": rope.get("rope_theta", config.get("rope_theta", 10000)),
        "rotary_percent": family_of(config).rotated_share(config),
        "max_position_embeddings": config["max_position_embeddings"],
        "position_embedding_type": "rope",
        "group_query_attention": (config.get("num_key_value_heads") or 0) not in (0, config["num_attention_heads"]),
    }
