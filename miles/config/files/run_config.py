"""Write the settings of a run as a file for ``--config``: run.yaml, which repeats the run."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from miles.base.secret_values import HIDDEN, public, public_words
from miles.config.files.config_file import MEGATRON_CORE, SERVER_FLAGS
from miles.config.megatron.fields import MODEL_FLAGS, megatron_fields
from miles.config.settings import SECTIONS, Settings
from miles.config.sglang.server_flags import ROUTER, SERVER
from miles.config.spelling import group_words

FILE_NAME = "run.yaml"

_PLAIN = re.compile(r"[A-Za-z_./][\w./+-]*(:[\w./+-]+)*")  # text that YAML reads as itself, without quotes
_NOT_TEXT = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def run_config(settings: Settings, about: Iterable[str] = ()) -> str:
    """Return the text of run.yaml: every setting that has a value, by section, without secrets.

    Args:
        settings: Validated settings.
        about: Lines for the comment at its beginning.
    """
    lines = [f"# {line}".rstrip() for line in about]
    for name, section in SECTIONS.items():
        lines += _section(name, list(_entries(getattr(settings, name), section)))
    passed_on = ((SERVER, settings.server_flags.server), (ROUTER, settings.server_flags.router))
    lines += _section(SERVER_FLAGS, [entry for prefix, words in passed_on for entry in _server_flags(prefix, words)])
    lines += _section(MEGATRON_CORE, list(_megatron_core(settings.megatron_overrides)))
    return "\n".join(lines) + "\n"


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
    """Yield the flags that are passed on to SGLang, under their names here."""
    for flag, values in dict(group_words(words)).items():
        key = (prefix + flag.removeprefix("--"))[2:].replace("-", "_")
        shown = public_words([flag, *values])[1:]
        yield f"{key}: {_yaml(shown if len(shown) > 1 else shown[0] if shown else True)}"


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
