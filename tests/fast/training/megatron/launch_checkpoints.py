"""Run checkpoint_checks.py on real ranks over gloo: ``python launch_checkpoints.py FOLDER``; see launch.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launch  # prepares the process for Megatron, which the next imports load

# isort: split
import checkpoint_checks
from auxiliary_oracle import save_with_heads
from layouts import save_models


def main(folder: Path) -> None:
    save_models(folder)
    save_with_heads(folder, "untied")
    results: dict[str, dict[str, str]] = {}

    def run(title: str, layout: str, *checks: Callable[..., Any]) -> None:
        results[title] = launch.run_layout(folder, layout, {check.__name__: check for check in checks})

    for name, checks in checkpoint_checks.SAVING.items():
        run(f"{name}: saved", name, *checks)
    for name, checks in checkpoint_checks.RESUMING.items():
        run(f"{name}: resumed", name, *checks)
    run("killed", "dp2", checkpoint_checks.killed_while_saving)
    run("after the kill", "tp2", checkpoint_checks.last_checkpoint_is_whole)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
