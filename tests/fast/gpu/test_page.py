"""The page of tests/gpu/run.sh, without a GPU: every part is on it, with its result and the reason."""

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]


def test_tests_that_are_all_skipped_are_no_success(tmp_path):
    (tmp_path / "test_none.py").write_text("import pytest\n\ndef test_a():\n    pytest.skip('no such GPU')\n")
    words = [sys.executable, "tests/gpu/run_tests.py", str(tmp_path / "r.xml"), "-n", "0", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(words, cwd=REPO, env=environ, capture_output=True, text=True)
    assert done.returncode == 77 and "\nskipped: no such GPU\n" in done.stdout


def run(out, **environment):
    """Run run.sh without the interpreter's own PYTHONPATH; return its exit status and output."""
    environ = {**os.environ, "PYTHON": sys.executable, "DEVICE": "cpu", **environment}
    done = subprocess.run(["bash", "tests/gpu/run.sh", str(out)], cwd=REPO, env=environ, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_parts_that_do_not_run_say_why_and_are_no_success(tmp_path):
    status, output = run(tmp_path, PARTS="^$")
    assert status == 1
    for part in ("environment", "run-fsdp", "sglang-stop", "step-megatron"):
        assert f"| {part} | skipped | 0 | not in PARTS=^$ |" in output
    assert "| sglang-families | skipped | 0 | these tests need a GPU |" in output


# Instead of the program that runs a part: notes the limit, and makes the folder of checkpoints.
TIMEOUT = """#!/usr/bin/env bash
echo "$3" >> "$LIMITS"
while [ $# -gt 0 ]; do [ "$1" != --save ] || mkdir -p "$2"; shift; done
"""
