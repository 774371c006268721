"""Run adapter_checks.py on real ranks over gloo: ``python launch_adapters.py FOLDER LAYOUT...``; see launch.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import launch  # noqa: E402  # prepares the process for Megatron, which the next imports load

# isort: split
import adapter_checks  # noqa: E402
from layouts import save_models  # noqa: E402


def main(folder: Path, names: list[str]) -> None:
    save_models(folder)
    results: dict[str, dict[str, str]] = {}
    for name in names:
        results[name] = launch.run_layout(folder, name, {check.__name__: check for check in adapter_checks.CHECKS})
    last = {check.__name__: check for check in adapter_checks.LAST}
    results["read on one rank"] = launch.run_layout(folder, "one", last)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
