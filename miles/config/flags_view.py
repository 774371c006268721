"""Show the settings of a run to functions of the user's, as they expect them: attributes with the names of flags."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from miles.compat.custom_config import read_custom_config
from miles.config.settings import Settings


def flags_view(settings: Settings) -> SimpleNamespace:
    """Return every setting by its flag's name (``args.n_samples_per_prompt``), and what ``--custom-config-path`` adds.

    Of Megatron's own flags those are there that the command gives. Flags of SGLang's servers are passed on unread, so
    they are not. It is a copy: a function that changes it changes nothing in the run.
    """
    values = dict[str, Any]()
    path = settings.rollout.custom_config_path
    if path is not None:
        values |= read_custom_config(path)
    for section in fields(settings):
        of_section = getattr(settings, section.name)
        if is_dataclass(of_section):
            values |= {field.name: getattr(of_section, field.name) for field in fields(of_section)}
    values |= dict(settings.megatron_overrides)
    return SimpleNamespace(**values)
