"""The reference answer of a prompt, as the built-in rewards want it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

from miles.base import strict_json
from miles.types.sample import Prompt


def plain_number(number: float | Real | Decimal) -> str:
    """Return the shortest plain decimal that is ``number`` at its own width.

    >>> plain_number(1e-7), plain_number(1e16), plain_number(42.0), plain_number(Decimal("18.90"))
    ('0.0000001', '10000000000000000', '42', '18.9')
    """
    if isinstance(number, Integral):
        return str(int(number))
    text = f"{Decimal(str(number)):f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def reference_text(prompt: Prompt, rm_type: str) -> str:
    """Return the prompt's label as stripped text; a number is its ``plain_number``.

    Raises ``ValueError`` for a label that is missing, empty, or neither text nor number.
    """
    label = prompt.label
    if label is None:
        raise ValueError(
            f"--rm-type {rm_type}: the prompt {prompt.source} has no label to compare with; name the column of the "
            f"reference answers with --label-key"
        )
    if isinstance(label, bool) or not isinstance(label, str | Real | Decimal) or not str(label).strip():
        raise ValueError(
            f"--rm-type {rm_type}: the label of the prompt {prompt.source} is {label!r}; it must be text or a number: "
            f"name another column with --label-key, or correct the row"
        )
    return label.strip() if isinstance(label, str) else plain_number(label)


def reference_texts(prompt: Prompt, rm_type: str) -> list[str]:
    """Return the labels of a prompt: its label, or each of a list of alternatives, as ``reference_text`` gives them.

    Raises ``ValueError`` for a label that is missing, empty, or neither text nor number.
    """
    alternatives = prompt.label if isinstance(prompt.label, list) and prompt.label else [prompt.label]
    return [reference_text(replace(prompt, label=label), rm_type) for label in alternatives]


def reference_object(prompt: Prompt, rm_type: str, *keys: str) -> dict[str, Any]:
    """Return the object with one of ``keys`` that the prompt's metadata or label holds; a label may be its JSON text.

    Raises:
        ValueError: Neither holds one.
    """
    label = prompt.label
    if isinstance(label, str):
        with suppress(ValueError):
            label = strict_json.loads(label)
    for found in (prompt.metadata, label):
        if isinstance(found, dict) and any(key in found for key in keys):
            return found
    raise ValueError(
        f"--rm-type {rm_type}: the prompt {prompt.source} has no {' or '.join(keys)} in its metadata or label; name "
        f"their columns with --metadata-key or --label-key"
    )
