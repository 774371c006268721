"""The part ``checkpoints`` of launch.py: write under some layouts, then read under others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_checks
from launch import run_layout
from layouts import save_models


def run(folder: Path, whole: bool) -> dict[str, dict[str, str]]:
    """Return the failures by layout, with its part of the test, and check."""
    save_models(folder, checkpoint_checks.OWN_MODELS)
    results: dict[str, dict[str, str]] = {}

    def run_checks(title: str, layout: str, *checks: Callable[..., Any]) -> None:
        results[title] = run_layout(folder, layout, {check.__name__: check for check in checks}, whole=whole)

    for name, checks in checkpoint_checks.saving(whole).items():
        run_checks(f"{name}: saved", name, *checks)
    for name, checks in checkpoint_checks.resuming(whole).items():
        run_checks(f"{name}: resumed", name, *checks)
    run_checks("killed", "dp2", checkpoint_checks.killed_while_saving)
    run_checks("after the kill", "tp2", checkpoint_checks.last_checkpoint_is_whole)
    return results
