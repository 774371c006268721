"""Write the settings of a run as a file for ``--config``: run.yaml, which repeats the run."""

import dataclasses
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from typing import Any

from miles.base.flags import FlagError
from miles.base.secrets import HIDDEN, public, public_words
from miles.config.evaluation import EvaluationArguments
from miles.config.files import MEGATRON_CORE, SERVER_FLAGS
from miles.config.megatron.fields import MODEL_FLAGS, megatron_fields
from miles.config.settings import SECTIONS, Settings
from miles.config.spelling import group_words
from miles.config.validate import validate

FILE_NAME = "run.yaml"

_PLAIN = re.compile(r"[A-Za-z_./][\w./+-]*(:[\w./+-]+)*")  # text that YAML reads as itself, without quotes
_NOT_TEXT = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


# What validation fills in from other settings. A file without them follows a change of the others.
_DERIVED = {
    "training": ("global_batch_size",),
    "loss": ("policy_loss",),
    "cluster": ("rollout_num_gpus",),
    "rollout": ("over_sampling_batch_size",),
    "evaluation": tuple(field.name for field in fields(EvaluationArguments) if field.default is None),
}


def run_config(settings: Settings, about: Iterable[str] = (), set_fields: Collection[str] = ()) -> str:
    """Return the text of run.yaml: every setting that has a value, by section, without secrets.

    A value that follows from others is left out, so that overriding one of these is enough.

    Args:
        settings: Validated settings.
        about: Lines for the comment at its beginning.
        set_fields: The fields that the user has set (``Command.set_fields``); they are never left out.
    """
    settings = _without_derived(settings, set_fields)
    lines = [f"# {line}".rstrip() for line in about]
    for name, section in SECTIONS.items():
        lines += _section(name, list(_entries(getattr(settings, name), section)))
    passed_on = settings.server_flags.by_prefix().items()
    lines += _section(SERVER_FLAGS, [entry for prefix, words in passed_on for entry in _server_flags(prefix, words)])
    lines += _section(MEGATRON_CORE, list(_megatron_core(settings.megatron_overrides)))
    return "\n".join(lines) + "\n"


def _without_derived(settings: Settings, set_fields: Collection[str]) -> Settings:
    """Return the settings without values that validation would fill in just so."""
    try:
        whole = validate(settings, set_fields).settings
    except FlagError:  # of Python, before ``miles.train`` is given a reward
        return settings
    short = settings
    for section, names in _DERIVED.items():
        for name in names:
            values = getattr(short, section)
            if name in set_fields or getattr(values, name) is None:
                continue
            changes: dict[str, Any] = {name: None}
            if name == "global_batch_size" and "num_steps_per_rollout" in set_fields:
                changes["num_steps_per_rollout"] = settings.steps_per_pass
            shorter = dataclasses.replace(short, **{section: dataclasses.replace(values, **changes)})
            with suppress(FlagError):  # needed, so it follows from nothing
                if validate(shorter, set_fields).settings == whole:
                    short = shorter
    return short


def _section(name: str, entries: list[str]) -> list[str]:
    return ["", f"{name}:", *(f"  {entry}" for entry in entries)] if entries else []


def _entries(values: Any, section: type) -> Iterator[str]:
    for field in dataclasses.fields(section):
        value = getattr(values, field.name)
        if value is None:
            continue
        line = f"{field.name}: {_yaml(public(field.name, value))}"
        is_default = value == field.default
        yield line if is_default or field.default is None else f"{line}  # default {_yaml(field.default)}"


def _server_flags(prefix: str, words: Iterable[str]) -> Iterator[str]:
    """Yield the flags that are passed on to servers, under their names here."""
    for flag, values in dict(group_words(words)).items():
        key = (prefix + flag.removeprefix("--"))[2:].replace("-", "_")
        texts = public_words([flag, *values])[1:]
        yield f"{key}: {_yaml(texts if len(texts) > 1 else texts[0] if texts else True)}"


def _megatron_core(overrides: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Yield the fields of Megatron's own dataclasses, under the names of their flags."""
    overrides = tuple(overrides)
    if not overrides:
        return
    known = megatron_fields() | {field.name: field for field in MODEL_FLAGS}
    for name, value in overrides:
        field = known[name]
        is_switch = field.kind == "bool"
        assert not is_switch or value == field.switch_to, f"no flag sets {name} to {value}"
        yield f"{field.flag[2:].replace('-', '_')}: {_yaml(True if is_switch else value)}"


def _yaml(value: Any) -> str:
    """Return a value as any YAML reader understands it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT and HIDDEN not in text:
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _float(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    text = repr(value)
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent}" if e else text
