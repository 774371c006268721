"""The page of tests/gpu/run.sh, without a GPU: every part is on it, with its result and the reason."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.page import page
from tests.gpu.run_tests import results

REPO = Path(__file__).resolve().parents[3]
XML = """<testsuites><testsuite>
<testcase name="test_one[qwen3]" time="3.2">
<properties><property name="figures" value='{"before": 0.004}'/></properties>
</testcase>
<testcase name="test_two" time="0"><skipped message="needs 2 GPUs"/></testcase>
<testcase name="test_three" time="1">
<failure message="AssertionError: after the update: {}&#10;assert 1 &lt; 0">…</failure>
</testcase>
</testsuite></testsuites>"""


def test_tests_are_shown_one_by_one(tmp_path):
    (tmp_path / "sglang-families.xml").write_text(XML)
    (tmp_path / "parts.tsv").write_text("sglang-families\tFAILED\t9\texit status 1; sglang-families.log\n")
    assert [one.result for one in results(tmp_path / "sglang-families.xml")] == ["ok", "skipped", "FAILED"]
    text = "\n".join(page(tmp_path))
    assert "| sglang-families | test_one[qwen3] | ok | 3 | before 4.0e-03 |" in text
    assert "| test_two | skipped | 0 | needs 2 GPUs |" in text
    assert "| test_three | FAILED | 1 | AssertionError: after the update: {} |" in text


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


def test_no_part_starts_when_the_time_is_used_up(tmp_path):
    status, output = run(tmp_path, PARTS="^environment$", BUDGET="1", PYTHON="true")
    assert status == 1 and "no time is left of BUDGET=1" in (tmp_path / "parts.tsv").read_text()


# Instead of the program that runs a part: notes the limit, and makes the folder of checkpoints.
TIMEOUT = """#!/usr/bin/env bash
echo "$3" >> "$LIMITS"
while [ $# -gt 0 ]; do [ "$1" != --save ] || mkdir -p "$2"; shift; done
"""


def parts_of_the_docs(device):
    """Return the parts that docs/cluster.md lists for a device, in order, with their limits in seconds."""
    page = (REPO / "docs/cluster.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+ s(?: each)?) \| (\w[^|]*) \|", page, re.M)
    left_out = "skipped" if device == "cpu" else "runs on CPU only"
    assert {on_cpu for _, _, on_cpu in rows} == {"runs", "skipped", "runs on CPU only"}
    listed = {}
    for parts, limits, on_cpu in rows:
        names, seconds = re.findall("`([^`]+)`", parts), re.findall(r"\d+", limits)
        if on_cpu != left_out:
            listed |= zip(names, seconds * len(names) if "each" in limits else seconds, strict=True)
    return list(listed.items())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_docs_list_the_parts_that_run(tmp_path, device):
    limited = tmp_path / "timeout"
    limited.write_text(TIMEOUT)
    limited.chmod(0o755)
    path, limits = f"{tmp_path}:{os.environ['PATH']}", tmp_path / "limits"
    environ = {"DEVICE": device, "PYTHON": "true", "PATH": path, "LIMITS": str(limits), "BUDGET": "99999"}
    status, output = run(tmp_path / "out", QUICKSTART="a_model", **environ)
    rows = [line.split("\t")[:2] for line in (tmp_path / "out/parts.tsv").read_text().splitlines()]
    ran = [name for name, result in rows if result == "ok"]
    assert status == 0 and list(zip(ran, limits.read_text().split(), strict=True)) == parts_of_the_docs(device), output
