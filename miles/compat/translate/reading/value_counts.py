"""How many values the flags of a command line take."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import cache

from miles.compat.launch.normalize import FOREIGN_FLAGS
from miles.compat.translate.launchers import openrlhf, openrlhf_underscores
from miles.config.megatron.fields import MODEL_FLAGS, megatron_fields
from miles.config.parser import build_parser

_KINDS = {"switch": 0, "value": 1, "list": math.inf}


def most_values(flag: str) -> float | None:
    """Return how many values ``flag`` takes at most: 0 for a switch, and None if that is not known."""
    return _counts().get(flag)


@cache
def _counts() -> dict[str, float]:
    fields = [*MODEL_FLAGS]
    with suppress(ValueError):  # megatron-core is not installed
        fields += megatron_fields().values()
    counts = {each.flag: math.inf if each.is_list else float(each.kind != "bool") for each in fields}
    counts |= {row.flag: _KINDS[row.kind] for row in FOREIGN_FLAGS.values() if row.kind in _KINDS}
    for action in build_parser()._actions:
        most = 1 if action.nargs is None else 0 if action.nargs == 0 else math.inf
        counts |= dict.fromkeys(action.option_strings, most)
    earlier = openrlhf_underscores.EARLIER
    switches = {key for key, row in (openrlhf.ROWS | openrlhf_underscores.ROWS).items() if row.kind == "switch"}
    return counts | dict.fromkeys([*switches, *(earlier[key] for key in switches if key in earlier)], 0)
