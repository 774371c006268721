"""Run sglang-router without its balancer for tests: ``python -m miles.engine.sglang.router_process …``.

The balancer (``--mini-lb``) imports all of SGLang for its traces: 6 of the 6.5 s of processor time that a router takes
to start. The router itself needs none of it.
"""

from __future__ import annotations

import runpy
import sys
from types import ModuleType

BALANCER = "sglang_router.mini_lb"


def without_balancer() -> ModuleType:
    """Return a module instead of the balancer's, with the one name that the router imports from it."""
    module = ModuleType(BALANCER)
    module.MiniLoadBalancer = None  # type: ignore[attr-defined]
    return module


if __name__ == "__main__":
    if not any(word.startswith("--mini") for word in sys.argv):  # the router accepts abbreviations
        sys.modules[BALANCER] = without_balancer()
    runpy.run_module("sglang_router.launch_router", run_name="__main__", alter_sys=True)
