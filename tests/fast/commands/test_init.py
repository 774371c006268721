"""``miles init``: its files are tested, explained and trained unchanged, by the commands that it prints."""

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from miles import cli
from miles.commands import init
from miles.compat.border import read_command
from miles.config.parser import judge
from miles.observe.run_files import RunFiles
from tests.fast.docs.tutorial_page import MILES, REPO

SHORT = ["--num-rollout", "2", "--n-samples-per-prompt", "2", "--fp32"]


@pytest.fixture
def model(tiny_model, tmp_path):
    """The tiny model with more positions: its tokens are bytes."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return str(folder)


def begin(task, model, tmp_path, capsys):
    """Run ``miles init`` and the test of the reward; return the folder, and the commands that were printed."""
    assert init.main([str(tmp_path / "mine"), "--task", task, "--model", model]) == 0
    folder = tmp_path / "mine"
    assert sorted(path.name for path in folder.iterdir()) == ["data.jsonl", "reward.py", "run.yaml"]
    assert len([json.loads(row) for row in (folder / "data.jsonl").read_text().splitlines()]) == 3
    return folder, capsys.readouterr().out.splitlines()[-6:]


@pytest.mark.parametrize("task", init.TASKS)
def test_the_reward_has_a_test_that_can_fail(task, model, tmp_path, capsys):
    folder, _ = begin(task, model, tmp_path, capsys)
    runpy.run_path(str(folder / "reward.py"), run_name="__main__")
    text = (folder / "reward.py").read_text()
    wrong = text.replace("float(", "float(not ").replace("share / 2", "share").replace("0.5 * has_called", "has_called")
    (folder / "reward.py").write_text(wrong)
    with pytest.raises(AssertionError):
        runpy.run_path(str(folder / "reward.py"), run_name="__main__")


@pytest.mark.parametrize("task", init.TASKS)
def test_the_settings_are_read_without_a_surprise(task, model, tmp_path, capsys, monkeypatch):
    folder, commands = begin(task, model, tmp_path, capsys)
    assert [line.split()[0:2] for line in commands] == [
        ["cd", str(folder)],
        ["python", "reward.py"],
        ["miles", "explain"],
        ["miles", "train"],
        ["miles", "train"],
        ["miles", "report"],
    ]
    monkeypatch.chdir(folder)
    trial, run = (judge(read_command(shlex.split(line, comments=True)[2:])) for line in commands[3:5])
    assert trial.settings.rollout.debug_rollout_only and not trial.accepted
    assert run.settings.training.use_dynamic_batch_size and not run.accepted
    assert 10 <= len([line for line in (folder / "run.yaml").read_text().splitlines() if line[0] != "#"]) <= 16


@pytest.mark.slow  # the tutorial of rewards does what is printed for math
@pytest.mark.parametrize("task", init.TASKS)
@pytest.mark.timeout(600)
def test_the_printed_commands_train(task, model, tmp_path, capsys):
    folder, commands = begin(task, model, tmp_path, capsys)
    # A link to the interpreter would not find the packages of its virtual environment.
    for name, program in {"miles": MILES, "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'}.items():
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    environ = os.environ | {
        "PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]]),
        "PYTHONPATH": str(REPO),
        "TUTORIAL_PYTHON": sys.executable,
        "TUTORIAL_FLAGS": " ".join(SHORT),
    }
    lines = [*commands[:5], f"{commands[5]} --static page.html"]  # a page in a file: it is not served
    ended = subprocess.run(
        ["bash", "-euc", "\n".join(lines)], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = RunFiles(folder / "outputs" / "run").read_metrics()
    assert [row["step"] for row in rows] == [1, 2] and (folder / "page.html").is_file()


def test_a_folder_with_files_is_left_alone(model, tmp_path, capsys):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").touch()
    with pytest.raises(SystemExit) as ended:
        init.main([str(mine), "--model", model])
    assert ended.value.code == 2 and "holds files already; give a new folder" in capsys.readouterr().err
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["file"], "file: is a file, or is below one; give a new folder"),
        (["file/mine"], "file/mine: is a file, or is below one; give a new folder"),
        (
            ["mine", "--model", "/no/such"],
            "--model /no/such: no such folder; check the path, or give a Hugging Face name",
        ),
    ],
)
def test_what_cannot_be_is_refused(words, fault, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(SystemExit) as ended:
        sys.exit(cli.main(["init", *words, *([] if "--model" in words else ["--model", "some/name"])]))
    assert ended.value.code == 2 and capsys.readouterr().err.endswith(f"miles init: error: {fault}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_printed_cd_quotes_the_folder(model, tmp_path, capsys):
    assert init.main([str(tmp_path / "my run"), "--model", model]) == 0
    assert f"\ncd '{tmp_path / 'my run'}'\n" in capsys.readouterr().out
