"""Scripts that tests run in a process of their own, which forks ranks on CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent
FAST = SUPPORT.parent
ROOT = FAST.parents[1]
IMPORTED = (ROOT, SUPPORT, FAST / "conformance")  # besides the folder of the script itself


def cpu_environment() -> dict[str, str]:
    """The environment of a script: one thread per rank, no GPU, and the modules alongside the tests."""
    path = [*map(str, IMPORTED), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "CUDA_VISIBLE_DEVICES": "",
    }


def run_checks(script: Path, folder: Path, *words: str, seconds: float) -> Any:
    """Run ``script FOLDER WORDS…``, and return the content of FOLDER/results.json."""
    command = [sys.executable, str(script), str(folder), *words]
    done = subprocess.run(command, env=cpu_environment(), capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())
