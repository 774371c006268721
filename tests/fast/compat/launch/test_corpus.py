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


def test_the_corpus_is_large_enough():
    assert len(STARTING) >= 61 and len(LINES) >= 75


@pytest.mark.parametrize("line", STARTING, ids=name)
def test_starts(line, folder):
    validated = judge(read_command(line.words(folder)))
    assert validate(validated.settings).settings == validated.settings, "nothing is left to normalize"
    text = explain(validated)
    assert "Layout" in text and "Precision and memory" in text
    assert all(note.written in " ".join(text.split()) for note in validated.accepted if len(note.written) < 80)


@pytest.mark.parametrize("line", REFUSED, ids=name)
def test_reports_all_that_is_missing_at_once(line, folder):
    with pytest.raises(FlagError) as caught:
        judge(read_command(line.words(folder)))
    messages = caught.value.messages
    assert {re.match(r"--[\w-]+", message)[0] for message in messages} == set(line.refuses)
    assert all(re.match(r"--[\w-]+.*: .*; .+", message) for message in messages), "flag, rule and what to do"


@pytest.mark.parametrize("line", STARTING, ids=name)
def test_strict_flags_refuse_what_has_no_effect(line, folder):
    noted = [note for note in judge(read_command(line.words(folder))).accepted if note.is_refused_if_strict]
    strict = read_command([*line.words(folder), "--strict-flags"])
    if not noted:
        assert judge(strict)
        return
    with pytest.raises(FlagError) as caught:
        judge(strict)
    assert len(caught.value.messages) == len({note.refusal for note in noted})
