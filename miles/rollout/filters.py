"""Dynamic sampling (DAPO, 2503.14476 §3.2): which scored groups are worth training on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from miles.import_path import load_function
from miles.sample import PromptGroup

_FLAG = "--dynamic-sampling-filter-path"


@dataclass(frozen=True)
class FilterDecision:
    """Keep the group or drop it. ``reason`` is a short name: drops are counted as ``rollout/dropped/<reason>``."""

    keep: bool
    reason: str = ""


class GroupFilter(Protocol):
    """Looks at one generated and scored group. It must not change it. A plain bool (keep?) is accepted too."""

    def __call__(self, group: PromptGroup) -> FilterDecision | bool: ...


def check_reward_nonzero_std(group: PromptGroup) -> FilterDecision:
    """Drop a group whose rewards are all equal: its group-relative advantages are zero."""
    return FilterDecision(keep=has_reward_spread(group), reason="zero_std")


def has_reward_spread(group: PromptGroup) -> bool:
    """True when the group's rewards differ. Compared as they are: a computed deviation may round off zero."""
    return len(set(group.rewards)) > 1


def load_group_filter(path: str) -> Callable[[PromptGroup], FilterDecision]:
    """The filter named by ``--dynamic-sampling-filter-path``, with its answers checked.

    A drop without a reason is counted under ``filtered``. Raises ``ValueError`` if the path cannot be imported and,
    when called, if the filter answers with anything but a ``FilterDecision`` or a bool.
    """
    function: GroupFilter = load_function(path, _FLAG)

    def decide(group: PromptGroup) -> FilterDecision:
        answer = function(group)
        if isinstance(answer, bool):
            answer = FilterDecision(keep=answer)
        if not isinstance(answer, FilterDecision):
            raise ValueError(
                f"{_FLAG} {path}: the filter returned {answer!r} for group {group.group_index} "
                f"({group.prompt.source}); return miles.rollout.filters.FilterDecision(keep, reason), or a bool"
            )
        return answer if answer.keep or answer.reason else FilterDecision(keep=False, reason="filtered")

    return decide
