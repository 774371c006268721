"""Names that programs use without an import, as the graders of LiveCodeBench, APPS and TACO provide them."""

from __future__ import annotations

import builtins
import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec

# Of a name that several have, the last counts; a module's own name goes before those in modules.
_ALL_NAMES_OF = (
    *("typing", "string", "re", "datetime", "copy", "random", "statistics", "operator", "io", "json", "sys"),
    *("fractions", "decimal", "collections", "heapq", "bisect", "math", "itertools", "functools"),
)
_MODULES = (*_ALL_NAMES_OF, "os", "time")
_WORD = re.compile(r"[^\W\d]\w*")


def prelude(program: str) -> str:
    r"""Return the import statements, a line each, for the words of ``program`` that graders define.

    >>> prelude("def total(xs: List[int]): return math.fsum(xs)")
    'from typing import List\nfrom math import fsum\nimport math'
    """
    words = set(_WORD.findall(program))
    if "np." not in program:
        words.discard("np")  # a usual name for a number, and numpy is slow to import
    return "\n".join(statement for name, statement in _statements().items() if name in words)


@cache
def _statements() -> dict[str, str]:
    """Return the import statement for each name; never one that would hide a built-in name, such as ``pow``."""
    statements = {}
    for module in _ALL_NAMES_OF:
        imported = import_module(module)
        for name in getattr(imported, "__all__", vars(imported)):
            # one letter is an abbreviation of a flag of re, and a usual name for a number
            if not name.startswith("_") and not hasattr(builtins, name) and (len(name) > 1 or module == "math"):
                statements[name] = f"from {module} import {name}"
    statements |= {module: f"import {module}" for module in _MODULES}
    if find_spec("numpy"):
        statements["np"] = "import numpy as np"
    return statements
