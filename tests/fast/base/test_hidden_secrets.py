"""What others see of a process that was started with secrets: its command line and its output."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from miles.base.secrets import hidden_in_output

REPO = Path(__file__).resolve().parents[3]
SHOW = """
import pathlib, sys
from miles.base.secrets import hide_on_command_line
hide_on_command_line(sys.argv[1:])
print(pathlib.Path("/proc/self/cmdline").read_bytes().decode().split("\\0")[3:-1])
print(sys.argv[1:])
"""


def test_other_users_see_no_secret_in_the_process_list():
    words = ["--label-key", "gold", "--wandb-key", "sesame", "--sglang-api-key=sésame", "--lr", "1"]
    words += ["--train-env-vars", '{"HF_TOKEN": "hf_sesame"}', "--wandb-host", "https://u:sesame@h"]
    run = subprocess.run([sys.executable, "-c", SHOW, *words], cwd=REPO, capture_output=True, text=True, check=True)
    seen, own = map(eval, run.stdout.splitlines())
    assert own == words
    assert seen[:6] == ["--label-key", "gold", "--wandb-key", "******", "--sglang-api-key=" + "*" * 7, "--lr"]
    assert len(seen) == len(words)
    assert not any("same" in word for word in seen)


def test_nothing_that_is_printed_shows_a_secret(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with hidden_in_output({"sesame"}):
        print("open", "sesame")
        print("the key sesame is wrong", file=sys.stderr, flush=True)
        assert not sys.stdout.isatty()
    assert (out.getvalue(), err.getvalue()) == ("open (hidden)\n", "the key (hidden) is wrong\n")
    assert sys.stdout is out and sys.stderr is err


def test_the_streams_come_back_after_an_error():
    before = sys.stdout, sys.stderr
    with pytest.raises(KeyError), hidden_in_output({"sesame"}):
        raise KeyError
    assert (sys.stdout, sys.stderr) == before
