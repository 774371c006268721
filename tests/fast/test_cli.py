"""The command ``miles`` finds commands by their file and suggests the nearest one for a wrong word."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miles import cli, commands
from miles.commands import command_names

REPO = Path(__file__).resolve().parents[2]


def miles(*words):
    return subprocess.run([sys.executable, "-m", "miles", *words], cwd=REPO, capture_output=True, text=True)


def test_help_lists_every_command_with_its_summary(capsys):
    assert cli.main(["--help"]) == 0
    output = capsys.readouterr().out
    for name in command_names():
        (line,) = [line for line in output.splitlines() if line.split()[:1] == [name]]
        assert len(line.split()) > 3, "a summary follows the name"


def test_a_new_file_is_a_new_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "say_hello.py").write_text(
        '"""Say hello."""\ndef main(argv):\n    print("hello", *argv)\n    return 3\n'
    )
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    assert cli.main(["say-hello", "you"]) == 3
    assert capsys.readouterr().out == "hello you\n"


@pytest.mark.parametrize(
    ("word", "answer"), [("trian", "did you mean train?"), ("zzz", f"give one of {', '.join(command_names())}")]
)
def test_an_unknown_command_is_refused_with_a_suggestion(word, answer):
    ended = miles(word)
    assert ended.returncode == 2
    assert ended.stderr == f"miles: error: {word}: no such command; {answer}\n"


def test_a_command_without_a_name_or_a_folder_is_refused(tmp_path):
    assert miles("").stderr.startswith("miles: error: '': no such command; give one of ")
    command = 'rmdir "$PWD"; exec "$0" -m miles doctor --quick'
    environ = os.environ | {"PYTHONPATH": str(REPO)}
    ended = subprocess.run(
        ["bash", "-c", command, sys.executable], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("miles: error: the current folder is gone") and ended.stderr.count("\n") == 1


def test_miles_train_does_the_same_as_train_py():
    flags = ["--lr", "fast"]
    script = subprocess.run([sys.executable, "train.py", *flags], cwd=REPO, capture_output=True, text=True)
    command = miles("train", *flags)
    assert command.stderr == script.stderr.replace("train.py: ", "miles train: ", 1) != script.stderr
    assert command.returncode == script.returncode == 2


@pytest.mark.parametrize(("flags", "age"), [("", "1 version old"), ("--async-steps=2", "2 versions old")])
def test_train_async_generates_ahead(flags, age):
    run = (
        "--hf-checkpoint some/model --prompt-data reasoning_gym:products --rm-type last_number --num-rollout 1 "
        "--rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 4 --explain"
    )
    command = [sys.executable, "train_async.py", *run.split(), *flags.split()]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    assert f"samples come from weights that are up to {age}" in ended.stdout and "given twice" not in ended.stdout


def test_a_reader_that_left_is_no_error(tmp_path):
    """As after ``| head``: no traceback."""
    (tmp_path / "trl.json").write_text('{"num_generations": 8, "loss_type": "grpo"}')
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        command = [sys.executable, "-m", "miles", "translate", str(tmp_path / "trl.json")]
        ended = subprocess.run(command, cwd=REPO, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "miles"],
        ["-m", "miles", "--help"],
        ["-m", "miles", "--version"],
        ["-m", "miles", "runs", "-h"],
        ["train.py", "--help"],
        ["train.py", "--version"],
    ],
)
def test_help_that_cannot_be_written_is_an_error(words):
    """argparse itself hides it; a reader that has left is none."""
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, *words], cwd=REPO, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "miles: error: standard output cannot be written (No space left on device)\n"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        ended = subprocess.run([sys.executable, *words], cwd=REPO, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_a_word_after_two_dashes_asks_for_no_help(tmp_path, monkeypatch, capsys):
    source = '"""Say more."""\nimport sys\ndef main(argv):\n    print(sys.stdout is sys.__stdout__)\n    return 0\n'
    (tmp_path / "say_more.py").write_text(source)
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    monkeypatch.setattr(sys, "__stdout__", sys.stdout)
    assert cli.main(["say-more", "--", "--help"]) == 0
    assert capsys.readouterr().out == "True\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.py", "@{file}"], "train.py: stopped by SIGINT; no run was active\n"),
        (["train_async.py", "@{file}"], "train_async.py: stopped by SIGINT; no run was active\n"),
        (["-m", "miles", "train", "@{file}"], "miles train: stopped by SIGINT; no run was active\n"),
        (["-m", "miles", "check-reward", "math", "--cases", "{file}"], "miles check-reward: stopped by SIGINT\n"),
    ],
)
def test_ctrl_c_before_a_run_is_one_sentence(tmp_path, words, said):
    """The process reads the file once this one can open it for writing; a read after the signal ends, too."""
    file = tmp_path / "fifo"
    os.mkfifo(file)
    command = [sys.executable, *(word.format(file=file) for word in words)]
    process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        with open(file, "w"):
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", said)


def test_a_long_command_that_does_not_exist_is_shown_in_part():
    ended = miles("a" * 5000 + "\n")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"miles: error: {'a' * 79}…: no such command; give one of ")
