"""``kill -9`` of a worker: the run continues from its checkpoint and trains on every prompt once.

``runs/test_async.py`` kills a trainer in the fast tests.
"""

import json
import pickle
import random
import subprocess
import sys

import pytest
from small_checkpoint import save_checkpoint

from miles.base.disk_faults import WriteFailed
from miles.run.failure_files import FailureFiles
from miles.run.restarts import Restarts, with_restarts
from miles.run.stop_requests import StopRequests

STEPS, BATCH = 2, 4


def trained_groups(folder, name, rollouts):
    files = [folder / f"{name}_{r}.jsonl" for r in range(rollouts)]
    return [json.loads(line)["group_index"] for file in files for line in file.read_text().splitlines()]


def kill_when_trained(run, steps_and_kinds):
    """Wait for the row of each step, then kill a worker of that kind."""
    for step, kind in steps_and_kinds:
        run.wait_until(lambda step=step: (run.output / "metrics.jsonl").exists() and step in run.rows(), seconds=240)
        run.wait_until(lambda kind=kind: run.kill_worker(kind))


def restarting(launch, workplace, name, *flags, **options):
    saved = ["--save", str(workplace / f"{name}_ckpt"), "--save-interval", "1"]
    saved += ["--save-debug-rollout-data", str(workplace / (name + "_{rollout_id}.jsonl"))]
    return launch(name, *saved, *flags, **options)


def check_prompts(run, folder, name, rollouts):
    """Check that no prompt is trained on twice, and that prompts not trained on were counted as too old."""
    taken = trained_groups(folder, name, rollouts)
    assert len(set(taken)) == len(taken) == rollouts * BATCH
    dropped = sum(row.get("rollout/dropped/stale", 0) for row in run.rows().values())
    assert max(taken) + 1 - len(taken) <= dropped


MODES = {"sync": [], "ahead": ["--async-steps", "1"], "fully": ["--async-steps", "1", "--fully-async"]}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES)
def test_random_kills_over_fifty_steps(launch, workplace, mode):
    name, rng = f"random_{mode}", random.Random(mode)
    run = restarting(launch, workplace, name, "--max-restarts", "9", "--num-rollout", "25", *MODES[mode])
    at = sorted(rng.sample(range(2, 48, 2), 5))
    kill_when_trained(run, [(step, rng.choice(["TrainActor", "RolloutActor"])) for step in at])
    assert run.wait() == 0, run.err
    check_prompts(run, workplace, name, 25)


class Attempts:
    """Fail as scripted, and record the settings of each start."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.loads = []

    def __call__(self, settings):
        self.loads.append(settings.checkpoint.load)
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome


@pytest.fixture
def settings_with(tmp_path):
    from miles.config.parser import parse

    def make(restarts, **checkpoint):
        words = ["--max-restarts", str(restarts), "--save", str(tmp_path / "ckpt")]
        words += [w for name, value in checkpoint.items() for w in (f"--{name}", value)]
        return parse(words)

    return make


def died():
    import ray.exceptions

    return ray.exceptions.ActorDiedError()


def test_the_next_attempt_resumes_what_was_saved(settings_with, tmp_path, capsys):
    attempt = Attempts(died(), died(), None)

    def saving(settings):
        try:
            attempt(settings)
        finally:
            if len(attempt.loads) == 2:
                save_checkpoint(tmp_path / "ckpt", 1)

    with_restarts(settings_with(3), saving, Restarts(3), FailureFiles(tmp_path, []), StopRequests(60.0))
    assert attempt.loads == [None, None, str(tmp_path / "ckpt" / "iter_0000001")]
    printed = capsys.readouterr().err
    assert "restarting from the beginning, as nothing was saved yet (2 restarts left)" in printed
    assert "restarting from its last checkpoint (1 restarts left)" in printed


def test_the_last_failure_is_raised(settings_with, tmp_path):
    attempt = Attempts(died(), died())
    with pytest.raises(Exception, match="died"):
        with_restarts(settings_with(1), attempt, Restarts(1), FailureFiles(tmp_path, []), StopRequests(60.0))
    assert len(attempt.loads) == 2


@pytest.mark.parametrize("error", [ValueError("--lr"), OSError("disk full")])
def test_other_errors_are_raised_at_once(settings_with, error, tmp_path):
    attempt = Attempts(error)
    with pytest.raises(type(error)):
        with_restarts(settings_with(5), attempt, Restarts(5), FailureFiles(tmp_path, []), StopRequests(60.0))


@pytest.mark.parametrize(
    "cause", [ValueError("--lr"), WriteFailed("x.jsonl was not written, because the disk is full")]
)
def test_what_the_user_has_to_fix_is_raised_at_once_from_a_worker_too(settings_with, cause, tmp_path):
    import ray.exceptions

    error = pickle.loads(pickle.dumps(ray.exceptions.RayTaskError("generate", "the traceback", cause)))
    with pytest.raises(ray.exceptions.RayTaskError) as raised:
        with_restarts(settings_with(5), Attempts(error), Restarts(5), FailureFiles(tmp_path, []), StopRequests(60.0))
    assert str(raised.value.cause) == str(cause)


REPLACED = """
import os, sys, threading
from miles.run.restarts import Continuation

held = os.open("/dev/null", os.O_RDONLY)
os.set_inheritable(held, True)  # as some libraries' are
os.environ["ADDED_BY_RAY"] = "1"
state = {"pid": os.getpid(), "secret": "sesame", "held": held}
continuation = Continuation("replacing:report", state, {"PATH": os.environ["PATH"]})
output = {number: os.dup(number) for number in (1, 2)}
with open(os.devnull, "wb") as nothing:
    os.dup2(nothing.fileno(), 1)
sys.path.append(sys.argv[1])
thread = threading.Thread(target=continuation.take_over, args=(output,))  # as the watch over Ray does
thread.start()
thread.join()
print("not reached", file=sys.stderr)
"""
REPLACING = """
import json, os, sys

def report(state):
    command = open("/proc/self/cmdline").read()
    state_of_child = {"same": state["pid"] == os.getpid(), "shown": "sesame" in command, "state": state["secret"]}
    state_of_child["environment"] = "ADDED_BY_RAY" in os.environ
    try:
        os.fstat(state["held"])
        state_of_child["inherited"] = os.readlink(f"/proc/self/fd/{state['held']}") == "/dev/null"
    except OSError:
        state_of_child["inherited"] = False
    print(json.dumps(state_of_child))
    sys.exit(7)
"""


def test_a_launcher_becomes_another_one_in_its_process_with_its_output(tmp_path):
    (tmp_path / "replacing.py").write_text(REPLACING)
    command = [sys.executable, "-c", REPLACED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 7, ended.stderr
    assert ended.stderr == ""
    expected = {"same": True, "shown": False, "state": "sesame", "environment": False, "inherited": False}
    assert json.loads(ended.stdout) == expected
