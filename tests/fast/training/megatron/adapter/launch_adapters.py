"""The parts ``adapters of LAYOUT`` of launch.py."""

from __future__ import annotations

from pathlib import Path

import adapter_checks
from launch import ADAPTERS, run_layout


def run(folder: Path, names: list[str]) -> dict[str, dict[str, str]]:
    """Return the failures by part and check."""
    checks = {check.__name__: check for check in adapter_checks.CHECKS}
    results = {ADAPTERS + name: run_layout(folder, name, checks) for name in names}
    last = {check.__name__: check for check in adapter_checks.LAST}
    return results | {"adapters read on one rank": run_layout(folder, "one", last)}
