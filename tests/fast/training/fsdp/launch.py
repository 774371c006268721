"""Run every check on 1 and 2 real ranks over gloo: ``python launch.py FOLDER`` writes FOLDER/results.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import adapter_checks
import critic_checks
import distillation_checks
import family_checks
import reference_checks
import state_checks
from forked_ranks import run_on_ranks
from stage import Stage, save_models

WORLDS = (2, 1)  # 2 before 1: one rank loads what two saved
FILES = (state_checks, critic_checks, adapter_checks, distillation_checks, reference_checks, family_checks)
CHECKS: dict[int, list[Callable[[Stage], None]]] = {
    1: [check for file in FILES for check in (*getattr(file, "CHECKS", ()), *getattr(file, "AFTER_TWO_RANKS", ()))],
    2: [check for file in FILES for check in (*getattr(file, "CHECKS", ()), *getattr(file, "ON_TWO_RANKS", ()))],
}


def _run_world(folder: Path, world: int) -> dict[str, str]:
    """Return the failures of each check; empty if it passes on all ranks."""
    stages = [Stage(folder, rank, world) for rank in range(world)]
    return run_on_ranks(folder, f"{world} ranks", stages, {check.__name__: check for check in CHECKS[world]})


def main(folder: Path) -> None:
    save_models(folder)
    (folder / "results.json").write_text(json.dumps({world: _run_world(folder, world) for world in WORLDS}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
