"""miles: reinforcement-learning post-training of language models, from one command line or from Python."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from miles.version import __version__

if TYPE_CHECKING:
    from miles.api import Run, Settings, explain, train

__all__ = ["Run", "Settings", "__version__", "explain", "train"]


def __getattr__(name: str) -> Any:
    """Import the Python interface (api.py) when one of its names is used, and not with ``import miles``."""
    if name in __all__:
        return getattr(importlib.import_module("miles.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
