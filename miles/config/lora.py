"""Train a low-rank adapter (LoRA, arXiv 2106.09685) instead of all weights (docs/recipes.md).

A chosen linear layer of weight W computes ``W x + (alpha / rank) B A x``. A [rank, in] and B [out, rank] are trained,
and B starts at 0; W stays unchanged.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

from miles.base.flags import Errors, flag
from miles.config.components import TRAIN_BACKENDS
from miles.config.megatron.settings import MegatronArguments
from miles.config.model import ModelArguments, local_config
from miles.models.reading import linear_layers
from miles.models.registry import converted_family

ALL_LINEAR = "all-linear"

# Names of Megatron's fused layers, as scripts give them, and the layers of a Hugging Face model that they hold.
FUSED_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
_NAME = re.compile(r"\w+(\.\w+)*")
_NOT_CALLED = ("lm_head", "embed_tokens", "embed_out", "wte")  # the trainer reads their weights
_IN_EXPERTS = {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

_of_adapter = partial(flag, needs="--lora-rank")


@dataclass(frozen=True)
class LoraArguments:
    """lora: a low-rank adapter that is trained instead of all weights."""

    lora_rank: int = flag(0, "rank of the adapter; 0 trains all weights", needs="a policy that learns", at_least=0)
    lora_alpha: int = _of_adapter(16, "the adapter's product is multiplied by this over --lora-rank", at_least=1)
    lora_dropout: float = _of_adapter(
        0.0, "part of the adapter's inputs that is dropped while it trains", within="[0, 1)"
    )
    target_modules: Optional[tuple[str, ...]] = _of_adapter(
        None,
        "linear layers that get an adapter, by name (q_proj,v_proj); default: all-linear, the layers of the decoder",
        nargs="+",
        type=str,
    )
    exclude_modules: Optional[tuple[str, ...]] = _of_adapter(
        None, "linear layers of --target-modules that get none, by name", nargs="+", type=str
    )

    @property
    def trains_adapter(self) -> bool:
        """Whether an adapter is trained, and not all weights."""
        return self.lora_rank > 0

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of ``--target-modules``, each on its own; empty means all linear layers."""
        names = _names(self.target_modules)
        return () if names == (ALL_LINEAR,) else names

    def adapts(self, name: str) -> bool:
        """Return whether linear layers of this name are adapted."""
        return name not in self.excluded and (not self.targets or name in self.targets)

    @property
    def excluded(self) -> tuple[str, ...]:
        """The names of ``--exclude-modules``, each on its own."""
        return _names(self.exclude_modules)


def _names(words: tuple[str, ...] | None) -> tuple[str, ...]:
    """Split lists at commas, and name the layers that Megatron's fused ones hold."""
    return tuple(dict.fromkeys(layer for name in _single(words) for layer in FUSED_LAYERS.get(name, (name,))))


def _single(words: tuple[str, ...] | None) -> Iterator[str]:
    """Yield the names of lists with commas, also of JSON: ``["q_proj", "v_proj"]``."""
    for word in words or ():
        for part in word.split(","):
            name = part.strip(" []\"'")
            if name:
                yield name


def check_lora(lora: LoraArguments, backend: str, model: ModelArguments, errors: Errors) -> None:
    """Check the adapter, and that the run trains one.

    Args:
        lora: The section.
        backend: The value of ``--train-backend``.
        model: The model that gets the adapter.
        errors: Collects the errors.
    """
    if not lora.trains_adapter:
        return
    _check_names("target_modules", lora.target_modules, errors)
    _check_names("exclude_modules", lora.exclude_modules, errors)
    if errors.none_about("hf_checkpoint", "target_modules") and has_experts(model):
        refuse_projections_of_experts(lora, errors)  # an adapter is for layers outside of experts
    if errors.none_about("lora_rank", "hf_checkpoint") and not TRAIN_BACKENDS[backend].reads_megatron_flags:
        _check_layers(lora, local_config(model, "hf_checkpoint") or {}, errors)


def _check_layers(lora: LoraArguments, config: dict[str, Any], errors: Errors) -> None:
    """Check that transformers' model has the named layers. Another family's layers are found when it is built."""
    kind = str(config.get("model_type"))
    known = linear_layers(kind)
    if known:
        choices = {name for name in known if not (counts_experts(config) and is_in_experts(name))}
        refuse_unknown_layers(lora, known, choices - {*_NOT_CALLED}, kind, errors)


def refuse_unknown_layers(
    lora: LoraArguments, known: Collection[str], choices: Collection[str], model_type: str, errors: Errors
) -> None:
    """Refuse names of layers that a model does not have.

    Args:
        lora: The section.
        known: The names of its linear layers, without the names of the modules around them.
        choices: The layers that can have an adapter.
        model_type: As its config names it.
        errors: Collects the refusals.
    """
    for field, names in (("target_modules", lora.targets), ("exclude_modules", lora.excluded)):
        layers = {name: name.split(".")[-1] for name in names}
        unknown = [name for name, last in layers.items() if last not in known and not last.isdecimal()]
        if unknown and errors.none_about(field):
            rule = f"a {model_type} has no linear layer named {' or '.join(unknown)}"
            errors.refuse(field, getattr(lora, field), rule, f"give some of {', '.join(sorted(choices))}")


def _check_names(field: str, words: tuple[str, ...] | None, errors: Errors) -> None:
    names = _names(words)
    if words is not None and not names:
        errors.refuse(field, words, "names no layer", "write q_proj,v_proj, or drop it")
    for name in names:
        last = name.split(".")[-1]
        if name == ALL_LINEAR and field == "target_modules":
            if len(names) > 1:
                errors.refuse(field, words, f"{ALL_LINEAR} has the other names in it", f"give {ALL_LINEAR} alone")
        elif not _NAME.fullmatch(name):
            rule = f"{name} is no name of a layer"
            errors.refuse(field, words, rule, "give the names of a Hugging Face model's layers: q_proj,v_proj")
        elif last in _NOT_CALLED and field == "target_modules":
            rule = f"{last} gets no adapter: only layers of the decoder do"
            errors.refuse(field, words, rule, f"drop {last}")


def refuse_projections_of_experts(lora: LoraArguments, errors: Errors) -> None:
    """Refuse the names in ``--target-modules`` that a model with experts has inside of them."""
    names = sorted({last for name in lora.targets if is_in_experts(last := name.split(".")[-1])})
    if names:
        rule = f"{', '.join(names)} of a model with experts: the experts' weights get no adapter in this version"
        what_to_do = f"name the layers of attention, or give {ALL_LINEAR}"
        errors.refuse("target_modules", lora.target_modules, rule, what_to_do)


def is_in_experts(layer: str) -> bool:
    """Return whether experts have a layer of this name.

    In a model with experts no other layer of such a name can have an adapter either: peft, given ``gate_proj`` or
    ``layers.0.mlp.gate_proj``, puts it into the experts (peft 0.21.2 ``utils/transformers_weight_conversion.py``).
    """
    return layer.split(".")[-1] in _IN_EXPERTS


def has_experts(model: ModelArguments) -> bool:
    """Return whether the model has experts, if its ``config.json`` can be read without a network."""
    return counts_experts(local_config(model, "hf_checkpoint") or {})


def counts_experts(config: dict[str, Any]) -> bool:
    """Return whether a model with this Hugging Face config has experts."""
    text = config.get("text_config") or config
    return any(text.get(name) for name in _EXPERT_COUNTS)


def readings_of_lora(lora: LoraArguments) -> Iterator[str]:
    """Yield the names of Megatron's fused layers, and those that are meant."""
    if not lora.trains_adapter:
        return
    for name in dict.fromkeys(_single(lora.target_modules)):
        if name in FUSED_LAYERS:
            yield f"--target-modules {name}: read as {','.join(FUSED_LAYERS[name])}"


def notes_on_lora(lora: LoraArguments, model: ModelArguments) -> Iterator[str]:
    """Yield notes on settings that are allowed, and may surprise."""
    if lora.trains_adapter and not lora.targets and has_experts(model):
        yield "--lora-rank: the layers of attention get an adapter; experts and dense layers get none"


def explain_lora(lora: LoraArguments) -> list[str]:
    """Return the line about the adapter, if there is one."""
    if not lora.trains_adapter:
        return []
    where = ",".join(lora.targets) or ALL_LINEAR
    without = f" without {','.join(lora.excluded)}" if lora.excluded else ""
    dropout = f", dropout {lora.lora_dropout:g}" if lora.lora_dropout else ""
    return [
        f"adapter    W x + {lora.lora_alpha}/{lora.lora_rank} B A x in {where}{without}{dropout}; only A and B are "
        "trained, and engines receive the sum"
    ]


# Check that ``--lora-rank`` fits the model and the other flags of the Megatron backend.


_LINEAR = re.compile(r"(?!.*experts).*\.linear_\w+\.weight")


def check_adapter_flags(lora: LoraArguments, sizes: MegatronArguments, errors: Errors) -> None:
    """Check what does not depend on the model."""
    if not lora.trains_adapter:
        return
    if sizes.uses_bridge:
        rule = "with --megatron-to-hf-mode bridge: adapters are named by the converter of raw"
        errors.refuse("lora_rank", lora.lora_rank, rule, "drop --megatron-to-hf-mode")
    if sizes.mtp_heads:
        rule = "with --mtp-num-layers: the heads have no adapter, and would not learn"
        errors.refuse("lora_rank", lora.lora_rank, rule, "drop --mtp-num-layers and --enable-mtp-training")
    if sizes.has_router_loss:
        rule = "with a loss of the routers, whose weights an adapter leaves unchanged"
        errors.refuse("lora_rank", lora.lora_rank, rule, "drop --moe-aux-loss-coeff and --moe-z-loss-coeff")


def check_adapter_with_model(lora: LoraArguments, model_type: str, shape: dict[str, Any], errors: Errors) -> None:
    """Check the settings that the model determines.

    Args:
        lora: The section.
        model_type: As its config names it.
        shape: The model's shape in Megatron's terms.
        errors: Collects the refusal.
    """
    if not lora.trains_adapter:
        return
    if "num_moe_experts" in shape and errors.none_about("target_modules"):
        refuse_projections_of_experts(lora, errors)
    if shape.get("multi_latent_attention"):
        rule = f"the latent attention of a {model_type} gets no adapter with --train-backend megatron"
        errors.refuse("lora_rank", lora.lora_rank, rule, "use --train-backend fsdp")


def check_adapted_layers(lora: LoraArguments, config: dict[str, Any], shape: dict[str, Any], errors: Errors) -> None:
    """Check that the model with this Hugging Face config, and this shape, has the layers that flags name."""
    if not lora.trains_adapter or not errors.none_about("lora_rank"):
        return
    layer = converted_family(config).parameters(config, shape).layer
    names = (hf for name, binding in layer.items() if _LINEAR.fullmatch(name) for hf in binding.hf_names)
    known = {name.split(".")[-2] for name in names}
    choices = {name for name in known if not ("num_moe_experts" in shape and is_in_experts(name))}
    refuse_unknown_layers(lora, known, choices, config["model_type"], errors)
