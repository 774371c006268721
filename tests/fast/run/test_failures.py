"""Messages of failed runs, tested without a run."""

import os
import pickle
import pty
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import ray.exceptions

from miles.config.checkpoint import CheckpointArguments
from miles.engine.base import EngineFailed
from miles.run.failures import exit_with_message, how_to_resume
from miles.run.stop_requests import StopRequested, StopRequests
from miles.tasks.rewards.scoring import RewardError

NOTHING_SAVED = CheckpointArguments()


def test_how_to_resume_follows_what_is_on_disk(tmp_path):
    saving = CheckpointArguments(save=str(tmp_path))
    assert "no --save" in how_to_resume(NOTHING_SAVED)
    (tmp_path / ".writing_iter_0000002").mkdir()  # half-written
    assert "starts from the beginning" in how_to_resume(saving)
    (tmp_path / "iter_0000001").mkdir()
    assert f"--load {tmp_path}" in how_to_resume(saving)


@pytest.mark.parametrize(
    "fields, without",
    [
        ({}, ""),
        ({"finetune": True}, " and without --finetune"),
        ({"no_load_optim": True}, " and without --no-load-optim"),
        ({"no_load_optim": True, "no_load_rng": True}, " and without --no-load-optim and --no-load-rng"),
    ],
)
def test_how_to_resume_names_the_switches_to_leave_out(tmp_path, fields, without):
    (tmp_path / "iter_0000001").mkdir()
    sentence = how_to_resume(CheckpointArguments(save=str(tmp_path), load="elsewhere", **fields))
    assert sentence == f"the same command with --load {tmp_path}{without} continues from the last checkpoint"


def test_a_run_that_has_saved_nothing_starts_again_where_it_began(tmp_path):
    (tmp_path / "first" / "iter_0000001").mkdir(parents=True)
    began = {"load": str(tmp_path / "first"), "finetune": True}
    for section in (CheckpointArguments(**began), CheckpointArguments(save=str(tmp_path / "own"), **began)):
        assert how_to_resume(section).endswith(f", so the same command starts from --load {tmp_path}/first again")
    assert how_to_resume(CheckpointArguments(load=str(tmp_path))).endswith("so a new run starts from the beginning")


def test_value_error_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as ended, exit_with_message(NOTHING_SAVED, StopRequests(60.0)):
        raise ValueError("--lr -1: must be at least 0; give 0 or more")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "miles train: error: --lr -1: must be at least 0; give 0 or more\n"


def test_a_reward_that_raised_is_one_sentence_and_the_lines_of_the_users_file(capsys):
    error = RewardError("the reward function mine:score raised KeyError: 'x'; fix the reward function")
    error.add_note('Traceback (most recent call last):\n  File "mine.py", line 3, in score')
    with pytest.raises(SystemExit) as ended, exit_with_message(NOTHING_SAVED, StopRequests(60.0)):
        raise ray.exceptions.RayTaskError("generate", "a traceback of miles", pickle.loads(pickle.dumps(error)))
    assert ended.value.code == 1
    first, *trace, last = capsys.readouterr().err.splitlines()
    assert first == f"miles train: error: {error}"
    assert trace == ["Traceback (most recent call last):", '  File "mine.py", line 3, in score']
    assert last.startswith("miles train: the run stopped: the reward function failed (above); nothing was saved")


def test_an_engine_that_failed_is_one_sentence(capsys):
    error = pickle.loads(pickle.dumps(EngineFailed("engine 0: no answer\nat all")))
    with pytest.raises(SystemExit) as ended, exit_with_message(NOTHING_SAVED, StopRequests(60.0)):
        raise ray.exceptions.RayTaskError("generate", "a traceback of miles", error)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("miles train: the run stopped: engine 0: no answer at all; nothing was saved")


def test_other_errors_show_their_traceback(capsys):
    with pytest.raises(SystemExit) as ended, exit_with_message(NOTHING_SAVED, StopRequests(60.0)):
        raise OSError("disk full")
    output = capsys.readouterr().err
    assert ended.value.code == 1
    assert "Traceback" in output
    assert output.splitlines()[-1].startswith("miles train: the run stopped: OSError: disk full; nothing was saved")


class Silent(ValueError):
    def __str__(self):
        raise KeyError


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x" * 10**7 + "\x1b[2J\n" * 10**6),
        OSError("x" * 10**7 + "\x1b[2J\n" * 10**6),
        ray.exceptions.RayTaskError("collect", "  File x.py, line 3\n\x1b[2J" + "x" * 10**7, OSError("\x1b" * 10**6)),
        Silent(),
    ],
    ids=["ValueError", "OSError", "RayTaskError", "Silent"],
)
def test_what_user_code_raises_cannot_fill_or_control_the_terminal(capsys, error):
    with pytest.raises(SystemExit), exit_with_message(NOTHING_SAVED, StopRequests(60.0)):
        raise error
    output = capsys.readouterr().err
    assert len(output) < 200_000
    assert all(line.isprintable() for line in output.split("\n"))
    assert "x.py, line 3" in output or not isinstance(error, ray.exceptions.RayTaskError)


@pytest.mark.parametrize(
    ("number", "status", "who"),
    [
        (signal.SIGINT, 130, "stopped by the user;"),
        (signal.SIGTERM, 143, "stopped by SIGTERM;"),
        (signal.SIGHUP, 129, "stopped by SIGHUP;"),
        (signal.SIGQUIT, 131, "stopped by SIGQUIT;"),
        (signal.SIGABRT, 134, "stopped by SIGABRT;"),
    ],
)
def test_a_signal_is_one_sentence_and_the_status_of_its_number(capsys, number, status, who):
    stop = StopRequests(60.0)
    with pytest.raises(SystemExit) as ended, exit_with_message(NOTHING_SAVED, stop), stop.listening():
        signal.raise_signal(number)
    assert ended.value.code == status
    assert capsys.readouterr().err.startswith(who)


@pytest.mark.parametrize(("number", "is_obeyed"), [(signal.SIGHUP, False), (signal.SIGINT, True)])
def test_of_the_signals_that_are_ignored_in_the_background_only_nohups_stays_ignored(number, is_obeyed):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopRequests(60.0).listening() as stop, suppress(StopRequested):
            signal.raise_signal(number)
        assert stop.is_requested == is_obeyed
    finally:
        signal.signal(number, before)


def test_a_stop_that_takes_too_long_is_told(capsys):
    with StopRequests(0.01).listening() as stop, pytest.raises(StopRequested), stop.finish_first():
        signal.raise_signal(signal.SIGINT)
        signal.pause()  # until the timer
    assert "0.01 s (--stop-timeout) have passed: what is not saved by now is lost" in capsys.readouterr().err


ENDED = """
import os, signal, sys
from miles.run.stop_requests import StopRequests
with StopRequests(60.0).listening(is_last=True):
    pass
for _ in range(int(sys.argv[1])):
    signal.raise_signal(signal.SIGTERM)
print("the end")

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), numbers=(signal.SIGTERM, signal.SIGABRT)):
        for number in numbers:
            kill(pid, number)

sys.last = Last()  # deleted when Python has ended its handling of signals
"""


@pytest.mark.parametrize(("signals", "status", "output"), [(1, 0, "the end\n"), (2, -signal.SIGTERM, "")])
def test_a_signal_to_a_launcher_whose_run_is_complete_is_no_stop(signals, status, output):
    ended = subprocess.run([sys.executable, "-c", ENDED, str(signals)], stdout=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stdout) == (status, output)


PRINTING = """
from miles.config.checkpoint import CheckpointArguments
from miles.run.failures import exit_with_message
from miles.run.stop_requests import StopRequests
with exit_with_message(CheckpointArguments(), StopRequests(60.0)):
    while True: print("x" * 10_000)
"""


def test_a_reader_that_left_ends_the_run_without_a_traceback():
    command = [sys.executable, "-c", PRINTING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        error = process.stderr.read()
    assert process.returncode == 1
    assert error.startswith("miles train: the run stopped: standard output was closed; nothing was saved")
    assert len(error.splitlines()) == 1


def test_a_full_output_ends_the_run_without_a_traceback():
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", PRINTING], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    fault = "standard output cannot be written (No space left on device)"
    assert ended.stderr.startswith(f"miles train: the run stopped: {fault}; nothing was saved")
    assert len(ended.stderr.splitlines()) == 1


def test_a_closed_terminal_lets_the_iteration_finish(tmp_path):
    finished = tmp_path / "finished"
    script = (
        "import signal\n"
        "from miles.run.stop_requests import StopRequests\n"
        "with StopRequests(60.0).listening() as stop, stop.finish_first():\n"
        "    print('trains', flush=True)\n"
        "    while not stop.is_requested: signal.pause()\n"
        "    print('logs a step', flush=True)\n"
        f"    open({str(finished)!r}, 'w').write(str(stop.exit_status))\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", script])
    assert b"trains" in os.read(terminal, 100)
    os.close(terminal)  # sends SIGHUP
    os.waitpid(pid, 0)
    assert finished.read_text() == "129"
