"""Messages of failed runs, tested without a run."""

import signal

import pytest

from miles.arguments.checkpoint import CheckpointArguments
from miles.cluster.failures import exit_with_message, how_to_resume

NOTHING_SAVED = CheckpointArguments()


@pytest.fixture(autouse=True)
def same_sigterm_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_how_to_resume_follows_what_is_on_disk(tmp_path):
    saving = CheckpointArguments(save=str(tmp_path))
    assert "no --save" in how_to_resume(NOTHING_SAVED)
    (tmp_path / ".writing_iter_0000002").mkdir()  # half-written
    assert "starts from the beginning" in how_to_resume(saving)
    (tmp_path / "iter_0000001").mkdir()
    assert f"--load {tmp_path}" in how_to_resume(saving)


def test_value_error_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as ended, exit_with_message(NOTHING_SAVED):
        raise ValueError("--lr -1: must be at least 0; give 0 or more")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "train.py: error: --lr -1: must be at least 0; give 0 or more\n"


def test_other_errors_show_their_traceback(capsys):
    with pytest.raises(SystemExit) as ended, exit_with_message(NOTHING_SAVED):
        raise OSError("disk full")
    shown = capsys.readouterr().err
    assert ended.value.code == 1
    assert "Traceback" in shown
    assert shown.splitlines()[-1].startswith("train.py: the run stopped: OSError: disk full; nothing was saved")


def test_sigterm_acts_like_ctrl_c(capsys):
    with pytest.raises(SystemExit) as ended, exit_with_message(NOTHING_SAVED):
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 130
    assert "stopped by the user" in capsys.readouterr().err
