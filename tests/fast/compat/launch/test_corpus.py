"""Command lines in the manner of public launch scripts start, or report exactly the parts that are missing."""

import re
from pathlib import Path

import pytest

from miles.base.flags import FlagError
from miles.compat.border import read_command
from miles.config.explain import explain
from miles.config.parser import judge
from miles.config.validate import validate
from tests.fast.compat.launch.launch_corpus import Line, read_lines, write_files

LINES = read_lines()
STARTING = [line for line in LINES if not line.refuses]
REFUSED = [line for line in LINES if line.refuses]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    write_files(folder)
    return folder


def name(line: Line) -> str:
    return line.name


@pytest.mark.parametrize("line", STARTING, ids=name)
def test_starts_unless_strict_flags_refuse_what_has_no_effect(line, folder):
    validated = judge(read_command(line.words(folder)))
    assert validate(validated.settings).settings == validated.settings, "nothing is left to normalize"
    text = explain(validated)
    assert "Layout" in text and "Precision and memory" in text
    assert all(note.written in " ".join(text.split()) for note in validated.accepted if len(note.written) < 80)
    refusals = {note.refusal for note in validated.accepted if note.is_refused_if_strict}
    strict = read_command([*line.words(folder), "--strict-flags"])
    if not refusals:
        assert judge(strict)
        return
    with pytest.raises(FlagError) as caught:
        judge(strict)
    assert len(caught.value.messages) == len(refusals)


@pytest.mark.parametrize("line", REFUSED, ids=name)
def test_reports_all_that_is_missing_at_once(line, folder):
    with pytest.raises(FlagError) as caught:
        judge(read_command(line.words(folder)))
    messages = caught.value.messages
    assert {re.match(r"--[\w-]+", message)[0] for message in messages} == set(line.refuses)
    assert all(re.match(r"--[\w-]+.*: .*; .+", message) for message in messages), "flag, rule and what to do"
