"""Run one GRPO step and compare the files it enters with those that docs/architecture.md lists."""

import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
MOST_FILES = 25


def table(heading: str) -> list[list[str]]:
    """Return the names in backticks of the first column of each row of the first table after ``heading``."""
    page = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
    lines = page[page.index(heading) :].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            return rows
        rows.append(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return rows


@pytest.fixture(scope="module")
def entered(tiny_model, tmp_path_factory):
    """Return the files of miles that one GRPO iteration enters, on one rank with FSDP and the torch engine."""
    folder = tmp_path_factory.mktemp("trace")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"{i} + {i} = ", "label": str(2 * i)}) + "\n" for i in range(4)))
    script = Path(__file__).parent / "support" / "trace_one_step.py"
    command = [sys.executable, str(script), str(tiny_model), str(prompts), str(folder / "run")]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_step_is_read_through_the_files_of_the_table(entered):
    path = [file for row in table("## A GRPO step") for file in row]
    skipped = [pattern for row in table("Entered too, and skipped") for pattern in row]
    assert len(path) <= MOST_FILES
    assert set(path) <= set(entered), "the table names a file that a step does not enter"
    rest = [file for file in entered if file not in path]
    assert not [file for file in rest if not any(fnmatch(file, pattern) for pattern in skipped)], "not in either table"
    assert not [p for p in skipped if not any(fnmatch(file, p) for file in rest)], "a skipped file is not entered"


def test_aggregation_is_followed_through_at_most_five_files():
    page = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
    paragraph = page[page.index("**From `--loss-aggregation`") :].split("\n\n")[0]
    files = [file for file in re.findall(r"`([a-z_/]+\.py)`", paragraph)]
    assert len(files) <= 5
    users = {
        file
        for file in (str(p.relative_to(REPO / "miles")) for p in (REPO / "miles").rglob("*.py"))
        if re.search(r"sample_denoms|step_denominators|get_pg_loss_reducer", (REPO / "miles" / file).read_text())
    }
    assert set(files) <= users
    assert users - set(files) <= {
        "compat/losses.py",
        "objective/hooks.py",
        "objective/loss_types/custom_loss.py",
        "objective/loss_types/sft_loss.py",
        "observe/sample_records.py",
        "compat/translate/translation.py",
        "commands/rehearsal/trace.py",
        "commands/conformance_parts/batch.py",
    }, "hooks, SFT, what a report stores, the worked example and the losses of other trainers, rehearsals"
