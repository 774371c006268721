"""Every flag of ours that is obeyed has a test that shows its effect, by the tables of this folder."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from miles.base.flags import flag_name
from miles.config.settings import SECTIONS
from tests.fast.config.obeyed.shown import shown
from tests.fast.config.obeyed.test_components import CHANGES

TESTS = Path(__file__).parents[2]
REPO = TESTS.parents[1]
# Fields with one valid value, or that repeat a default: another value is refused, so none changes a run.
CONFIRM = {
    "optimizer": "adam is the only choice",
    "offload_train": "the default with --colocate on GPUs; refused elsewhere",
    "offload_rollout": "the default with --colocate on GPUs; refused elsewhere",
}


def test_each_has_an_entry():
    fields = Counter(field.name for section in SECTIONS.values() for field in dataclasses.fields(section))
    entries = Counter(name for names in shown().values() for name in names)
    entries += Counter({change.field for change in CHANGES}) + Counter(CONFIRM.keys())
    assert entries == fields, "one entry for each flag that is obeyed, and none for others"


@pytest.mark.parametrize("file", sorted({file for file, _ in shown()}))
def test_each_entry_is_a_test_whose_file_sets_the_flag(file):
    text = (TESTS / file).read_text(encoding="utf-8")
    defined = {
        node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for (place, test), names in shown().items():
        if place == file:
            assert test == "*" or test in defined
            missing = [name for name in names if name not in text and flag_name(name) not in text]
            assert not missing, f"{test} shows no effect of them"


# Files whose tests make their settings in their own process and take milliseconds: a flag can be ignored there.
CHECKED = (
    "rollout/test_groups.py",
    *(f"objective/policy_losses/test_{name}.py" for name in ("dppo", "dro", "geo_mean", "luspo", "sapo", "vespo")),
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_the_flag_the_test_fails(tmp_path):
    """Every field is ignored in turn: it has its default, whatever the test sets."""
    entries = {
        f"tests/fast/{file}::{test}": names
        for (file, test), names in shown().items()
        if test != "*" and file.startswith(CHECKED)
    }
    flags, found = tmp_path / "flags.json", tmp_path / "found.json"
    flags.write_text(json.dumps(entries))
    command = [sys.executable, "-m", "pytest", "-p", "tests.fast.support.ignored_flags", "-q", "-n", "0", *entries]
    environment = os.environ | {"IGNORED_FLAGS": str(flags), "IGNORED_FLAGS_FOUND": str(found)}
    ended = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    assert found.exists(), ended.stdout + ended.stderr
    passed: dict[str, list[dict[str, bool]]] = {}
    for node, results in json.loads(found.read_text()).items():
        passed.setdefault(node.partition("[")[0], []).append(results)
    unseen = [
        f"{test}: {name}"
        for test, names in entries.items()
        for name in names
        if not any(results[""] and not results[name] for results in passed[test])
    ]
    assert not unseen, "they pass though the flag is ignored"
