"""Check the flags that set fields of Megatron's own dataclasses.

The Hugging Face config determines the shape of the model, and this backend sets some fields itself: a flag may repeat
their values, as launch scripts do, and is an error if it states something else. The fields in ``TRIED`` are passed on.
All others are refused: megatron-core has them, but training with them has not been shown to be correct here.
"""

from __future__ import annotations

import math
import tomllib
from importlib.resources import files
from typing import Any, TypeAlias

from miles.base.flags import Errors
from miles.models.base import EXPERT_FIELDS, LAYER_FIELDS

FP32_EPSILON = 2.0**-23

Overrides: TypeAlias = tuple[tuple[str, Any], ...]  # name and value of each field that a flag sets

_TABLE = tomllib.loads((files(__package__) / "fields.toml").read_text(encoding="utf-8"))
FIXED: dict[str, tuple[Any, str]] = {name: (value, why) for name, (value, why) in _TABLE["fixed"].items()}
TRIED: tuple[str, ...] = tuple(_TABLE["tried"])
# Values that ask for nothing, and that scripts give for models which do not have the setting.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {name: tuple(values) for name, values in _TABLE["neutral"].items()}
# Fields of layers that no family of this backend has. --train-backend fsdp reads them from the config.
OF_OTHER_MODELS: set[str] = {*_TABLE["of_other_models"]}
# The fields that a model's config determines: they can be checked only after it has been read.
SHAPE_FIELDS = {*OF_OTHER_MODELS, *LAYER_FIELDS, *EXPERT_FIELDS, *_TABLE["of_model"]}
# Fields whose every value gives the same results: heading of the note, and reason.
FREE_FIELDS = {name: (row["heading"], row["why"]) for row in _TABLE["free"] for name in row["fields"]}


def check_overrides(overrides: Overrides, shape: dict[str, Any] | None, flags: dict[str, str], errors: Errors) -> None:
    """Check the fields of Megatron's dataclasses that flags set.

    Args:
        overrides: The fields, by name.
        shape: The model's shape in Megatron's terms; None if its config is not known yet.
        flags: The flag of each field.
        errors: Collects what contradicts the model or the backend.
    """
    for name, value in overrides:
        flag = flags[name]
        shown = flag if isinstance(value, bool) else f"{flag} {_words(value)}"
        if shape is not None and name in shape:
            if not repeats(_by_layer(value, shape[name]) if name == "moe_layer_freq" else value, shape[name]):
                errors.add(contradiction(name, value, flag, shape))
        elif name in FIXED:
            fixed, why = FIXED[name]
            if not repeats(value, fixed):
                errors.add(f"{shown}: contradicts --train-backend megatron: {why}; drop it")
        elif name in TRIED or asks_for_nothing(name, value) or (shape is None and name in SHAPE_FIELDS):
            continue
        elif shape is not None and name in SHAPE_FIELDS:
            errors.add(contradiction(name, value, flag, shape))
        else:
            errors.add(f"{shown}: {refusal_of(name)}; drop it")


def contradiction(name: str, value: Any, flag: str, shape: dict[str, Any]) -> str:
    """Return the error of a field that states something else than the model's config.

    Args:
        name: The field.
        value: Its value; a switch has True or False.
        flag: Its flag.
        shape: The model's shape in Megatron's terms.
    """
    neutral = NEUTRAL_VALUES.get(name, (None,))[0]
    if isinstance(value, bool):
        found = f"states the opposite of {flag}" if name in shape else f"describes a model without {flag}"
    elif shape.get(name, neutral) is None:
        found = f"describes a model without {flag}"
    else:
        found = f"gives {flag} {_words(shape.get(name, neutral))}"
    shown = flag if isinstance(value, bool) else f"{flag} {_words(value)}"
    return f"{shown}: contradicts --hf-checkpoint, whose config.json {found}; drop it"


_UNTESTED = "megatron-core has this setting, but training with it has not been tested here, so it is not accepted"
_REASONS = {
    ("fp8", "fp4"): "training in 8 or 4 bits is not part of this version, which has bf16 and fp32",
}


def asks_for_nothing(name: str, value: Any) -> bool:
    """Return whether a value asks for no more than a model without this setting computes."""
    return value in NEUTRAL_VALUES.get(name, ())


def refusal_of(name: str) -> str:
    """Say why a field that would change the result is refused."""
    return next((why for starts, why in _REASONS.items() if name.startswith(starts)), _UNTESTED)


def repeats(value: Any, wanted: Any) -> bool:
    """Return whether a flag states the value that holds anyway; lists of equal entries may be written as one entry.

    A float that a config has rounded to fp32, such as 9.999999747378752e-06, is the number that was rounded.
    """
    found = value[0] if isinstance(value, list) and not isinstance(wanted, list) and len(value) == 1 else value
    if isinstance(wanted, list) and len(set(map(str, wanted))) == 1 and found in (wanted[0], [wanted[0]]):
        return True
    if isinstance(found, float) and isinstance(wanted, float):
        return math.isclose(found, wanted, rel_tol=FP32_EPSILON)
    return bool(found == wanted)


def _by_layer(value: Any, wanted: Any) -> Any:
    """Write ``--moe-layer-freq N``, experts in every Nth layer, as one entry per layer."""
    step = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(step, int) and step > 0 and isinstance(wanted, list):
        return [int(layer % step == 0) for layer in range(len(wanted))]
    return value


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
