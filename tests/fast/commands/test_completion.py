"""Completion in a real bash: commands, their flags, and the choices of a flag."""

import subprocess

import pytest

from miles import cli
from miles.commands import command_names
from miles.commands.completion import script

ASK = """
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_miles
echo "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def complete():
    text = script() + ASK

    def ask(*words):
        ended = subprocess.run(["bash", "-c", text, "bash", "miles", *words], capture_output=True, text=True)
        assert ended.stderr == ""
        return ended.stdout.split()

    return ask


def test_commands(complete):
    assert complete("") == command_names()
    assert complete("qui") == ["quickstart"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "--rollout-batch"], ["--rollout-batch-size"]),
        (["explain", "--lr", "1", "--num-ep"], ["--num-epoch"]),
        (["quickstart", "--output"], ["--output-dir"]),
        (["doctor", "--j"], ["--json"]),
        (["report", "--st"], ["--static"]),
        (["train", "--train-backend", ""], ["fsdp", "megatron"]),
        (["quickstart", "--rollout-engine", "s"], ["sglang"]),
        (["rehearse", "--rehearse-d"], ["--rehearse-device"]),
        (["rehearse", "--train-backend", "m"], ["megatron"]),
        (["train", "--save", "some"], []),  # the shell completes files
        (["doctor", "--loss"], []),
    ],
)
def test_flags_and_choices(complete, words, expected):
    assert complete(*words) == expected


def test_a_flag_for_a_folder_completes_folders_and_another_one_files_too(complete, tmp_path):
    (tmp_path / "model_folder").mkdir()
    (tmp_path / "model_file").touch()
    start = f"{tmp_path}/model"
    assert complete("train", "--hf-checkpoint", start) == [f"{start}_folder"]
    assert complete("train", "--prompt-data", start) == []  # the shell completes files


def test_another_shell_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["completion", "fish"])
    assert "shell fish: no such choice; give one of 'bash', 'zsh'" in capsys.readouterr().err


def test_the_script_is_printed(capsys):
    assert cli.main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out.splitlines()[0]
