"""Read the flags of Megatron's own configuration as launch scripts mean them, before they are checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from miles.base.flags import Errors
from miles.config.abilities import reads_megatron_flags
from miles.config.megatron.fields import MODEL_FLAGS, MegatronField, megatron_fields
from miles.config.megatron.overrides import (
    FIXED,
    FREE_FIELDS,
    SHAPE_FIELDS,
    TRIED,
    asks_for_nothing,
    contradiction,
    refusal_of,
    repeats,
)
from miles.config.megatron.rules import lacks_bridge
from miles.config.model import local_config, readable_config
from miles.config.notes import MEMORY, NO_EFFECT, OTHER_PART, READ_AS, SAME, Note, note_on, written
from miles.config.settings import Settings
from miles.models.registry import CONVERTED, common_shape, megatron_shape, vocabulary_shape

# Fields that Megatron's latent attention does not read, and why.
NOT_LATENT = {
    "kv_channels": "latent attention has its own widths",
    "add_qkv_bias": "latent attention has no bias on queries, keys and values",
}
_MSCALES = ("mscale", "mscale_all_dim")
# Fields of Megatron's MLATransformerConfig, which it does not build for other attention.
OF_LATENT_ROPE = (*_MSCALES, "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")


@dataclass(frozen=True)
class FieldVerdict:
    """Say what becomes of a field that a flag sets.

    Attributes:
        value: The value that is passed on; None if the flag is dropped.
        note: Why it was dropped or replaced; None if it is passed on unchanged.
    """

    value: Any = None
    note: Note | None = None


def normalize_megatron(settings: Settings, errors: Errors) -> tuple[Settings, list[Note]]:
    """Drop the fields that change nothing; drop all of them if the backend does not read them."""
    if not settings.megatron_overrides:
        return settings, []
    fields = {field.name: field for field in (*MODEL_FLAGS, *megatron_fields().values())}
    given = dict(settings.megatron_overrides)
    shape = _shape(settings) or {}
    kept, notes = list[tuple[str, Any]](), list[Note]()
    if not reads_megatron_flags(settings) and "recompute_granularity" in given:
        shown = _shown(fields["recompute_granularity"], given.pop("recompute_granularity"))
        notes.append(Note(READ_AS, shown, "--gradient-checkpointing: every layer is recomputed"))
        settings = replace(settings, training=replace(settings.training, gradient_checkpointing=True))
    for name, value in given.items():
        if reads_megatron_flags(settings):
            verdict = judge(fields[name], value, shape, given)
        else:
            verdict = _judge_without_megatron(fields[name], value, shape, given, errors)
        notes += [verdict.note] if verdict.note is not None else []
        kept += [(name, verdict.value)] if verdict.value is not None else []
    return replace(settings, megatron_overrides=tuple(kept)), notes


def judge(field: MegatronField, value: Any, shape: dict[str, Any], given: dict[str, Any]) -> FieldVerdict:
    """Judge a field under ``--train-backend megatron``.

    Args:
        field: The field.
        value: Its value.
        shape: The known part of the model's shape, in Megatron's terms.
        given: All fields that flags set.
    """
    name, shown = field.name, _shown(field, value)
    if name in FIXED and repeats(value, FIXED[name][0]) and name not in _RECOMPUTE:
        return FieldVerdict(value)
    why = _why_without_effect(name, shape, given)
    if why is not None:
        return FieldVerdict(note=Note(NO_EFFECT, shown, why))
    if name in shape:
        return FieldVerdict(value)
    if name in _RECOMPUTE:
        return _judge_recomputation(name, value, shown, given)
    if name in FREE_FIELDS:
        heading, why = FREE_FIELDS[name]
        return FieldVerdict(note=Note(heading, shown, why))
    waits_for_shape = name in SHAPE_FIELDS and not shape
    if name not in TRIED and name not in FIXED and not waits_for_shape and _asks_for_nothing(field, value):
        return FieldVerdict(note=Note(SAME, shown, "the value that asks for nothing"))
    return FieldVerdict(value)


def _why_without_effect(name: str, shape: dict[str, Any], given: Mapping[str, Any]) -> str | None:
    """Return why Megatron's own layers do not read a field of this model; None if they do, or may."""
    if not shape:
        return None
    if not shape.get("multi_latent_attention"):
        if given.get("multi_latent_attention"):  # of a model whose attention only FSDP computes
            return None
        return "only latent attention reads it" if name in OF_LATENT_ROPE else None
    if name in NOT_LATENT:
        return NOT_LATENT[name]
    scales = shape.get("rope_type") != "rope" or given.get("rotary_scaling_factor", 1) != 1
    return "the rotary embedding is not scaled" if name in _MSCALES and not scales else None


def _asks_for_nothing(field: MegatronField, value: Any) -> bool:
    return value == field.default or asks_for_nothing(field.name, value)


def _judge_recomputation(name: str, value: Any, shown: str, given: dict[str, Any]) -> FieldVerdict:
    """Recomputation changes no result: any kind of it recomputes whole layers, one by one."""
    wanted = FIXED[name][0]
    if "recompute_granularity" not in given and name != "recompute_granularity":
        return FieldVerdict(note=Note(NO_EFFECT, shown, "without --recompute-granularity"))
    note = None if value == wanted else Note(MEMORY, shown, "recomputation covers whole layers, one by one")
    return FieldVerdict(wanted, note)


def _judge_without_megatron(
    field: MegatronField, value: Any, shape: dict[str, Any], given: dict[str, Any], errors: Errors
) -> FieldVerdict:
    """Drop a field, or refuse it if it states something else than the model's config or changes the result."""
    shown = _shown(field, value)
    unread = _why_without_effect(field.name, shape, given)
    if unread is not None:
        return FieldVerdict(note=Note(NO_EFFECT, shown, unread))
    why = "Megatron's, and --train-backend fsdp trains"
    is_whole = "num_layers" in shape and "vocab_size" in shape  # of a family that Megatron trains too
    says_more = is_whole and field.name in SHAPE_FIELDS and not _asks_for_nothing(field, value)
    if not repeats(value, shape[field.name]) if field.name in shape else says_more:
        errors.add(contradiction(field.name, value, field.flag, shape))
        return FieldVerdict()
    harmless = field.name in FREE_FIELDS or field.name in SHAPE_FIELDS or field.name in FIXED or field.name in TRIED
    if not harmless and not _asks_for_nothing(field, value):
        errors.add(f"{shown}: {refusal_of(field.name)}; drop it")
        return FieldVerdict()
    return FieldVerdict(note=Note(OTHER_PART, shown, why))


def _shape(settings: Settings) -> dict[str, Any] | None:
    """Return the model's shape if its config is on this machine and its family is known."""
    try:
        config = local_config(settings.model, "hf_checkpoint")
        if config is None:
            return None
        if config.get("model_type") not in CONVERTED:
            return None if reads_megatron_flags(settings) else common_shape(config)
        return {**megatron_shape(config), **vocabulary_shape(config)}
    except (ValueError, KeyError, TypeError):
        return None  # the validator reports it


def _shown(field: MegatronField, value: Any) -> str:
    return written(field.flag, value)


def normalize_converter(settings: Settings) -> tuple[Settings, list[Note]]:
    """Convert weights without Megatron-Bridge if it is not there, or an adapter is trained, and the family is known."""
    mode = settings.megatron.megatron_to_hf_mode
    if mode != "bridge" or not reads_megatron_flags(settings) or settings.model.hf_checkpoint is None:
        return settings, []
    config = readable_config(settings.model)
    if config is None or config.get("model_type") not in CONVERTED:
        return settings, []
    if not settings.lora.trains_adapter and not lacks_bridge():
        return settings, []
    why = "raw: miles converts this family itself, to the same weights"
    return (
        replace(settings, megatron=replace(settings.megatron, megatron_to_hf_mode="raw")),
        [note_on(READ_AS, "megatron_to_hf_mode", mode, why)],
    )
