"""Read settings back from the JSON that a run wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_type_hints

from miles.arguments.settings import Settings
from miles.input_error import InputError


def settings_from_json(sections: Mapping[str, Mapping[str, Any]], where: str) -> Settings:
    """Return the settings that ``RunHeader.settings`` describes. Secrets are not in it, and stay hidden.

    Args:
        sections: Section to field to value. Missing fields have their defaults.
        where: The file, for messages.

    Raises:
        InputError: A section or field is unknown: a later version wrote the file.
    """
    hints = get_type_hints(Settings)
    unknown = sections.keys() - hints.keys()
    found: dict[str, Any] = {}
    for name, values in sections.items():
        if name in unknown:
            continue
        section = hints[name]
        if not dataclasses.is_dataclass(section):  # megatron_overrides: pairs of a name and a value
            found[name] = tuple(values.items())
            continue
        known = {field.name for field in dataclasses.fields(section)}
        unknown |= {f"{name}.{field}" for field in values.keys() - known}
        given = {field: _frozen(value) for field, value in values.items() if field in known}
        assert isinstance(section, type)
        found[name] = section(**given)
    if unknown:
        names = ", ".join(sorted(unknown))
        raise InputError(f"{where}: unknown settings ({names}), of another version of miles; use that version")
    return Settings(**found)


def _frozen(value: Any) -> Any:
    """Return a JSON list as the tuple that it was."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
