"""A worker dies or is stopped while generation waits forever: the run does not wait for it."""

import json
import signal

import pytest

pytestmark = pytest.mark.timeout(900)

BATCH = 4


@pytest.fixture
def held(launch, workplace):
    """Return ``held(name, *flags)``: start a run that saves iteration 1, then waits forever, once, in iteration 2."""

    def start(name, *flags, **options):
        mark, checkpoints = workplace / f"{name}.held", workplace / f"{name}_ckpt"
        saving = ["--save", str(checkpoints), "--save-interval", "1", "--num-rollout", "3"]
        saving += ["--save-debug-rollout-data", str(workplace / (name + "_{rollout_id}.jsonl"))]
        run = launch(name, *saving, *flags, **options, HOLD_AT="1", HELD=str(mark))
        run.wait_until(lambda: mark.exists() and (checkpoints / "iter_0000001").exists())
        return run

    return start


def hang_report(run):
    """Return the text of the report that the last line names."""
    (path,) = run.output.glob("failure-*/hang_report.txt")
    assert str(path) in run.err.splitlines()[-1]
    return path.read_text()


def assert_each_prompt_trained_on_once(run, workplace, name):
    files = [workplace / f"{name}_{rollout_id}.jsonl" for rollout_id in range(3)]
    groups = [json.loads(line)["group_index"] for file in files for line in file.read_text().splitlines()]
    assert groups == list(range(3 * BATCH))
    assert sorted(run.rows()) == list(range(1, 7))
    assert run.none_left(), run.left()


@pytest.mark.slow
def test_a_trainer_that_dies_during_a_rollout_ends_the_run(held, workplace):
    run = held("dead_trainer")
    assert run.kill_worker("TrainActor")
    assert run.wait() == 1
    last = run.err.splitlines()[-1]
    assert last.startswith("train.py: the run stopped: trainer rank 0 died (out of memory, killed from outside, or ")
    assert f"--load {workplace / 'dead_trainer_ckpt'} continues from the last checkpoint" in last
    assert run.none_left(), run.left()


@pytest.mark.slow
def test_a_stopped_rollout_worker_is_replaced(held, workplace):
    run = held("replaced", "--use-fault-tolerance", "--worker-timeout", "5")
    assert run.kill_worker("RolloutActor", signal.SIGSTOP)
    assert run.wait() == 0, run.err
    assert "the rollout worker (process" in run.err and "worker is replaced" in run.err
    assert_each_prompt_trained_on_once(run, workplace, "replaced")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("RolloutActor", "the rollout worker"), ("TrainActor", "trainer rank")])
def test_a_stopped_worker_ends_the_run(held, workplace, kind, name):
    run = held(f"stopped_{kind}", "--worker-timeout", "5", ranks=2)
    assert run.kill_worker(kind, signal.SIGSTOP)
    assert run.wait() == 1
    last = run.err.splitlines()[-1]
    assert last.startswith(f"train.py: the run stopped: {name}")
    assert "has shown no sign of life for 5 s" in last and "continues from the last checkpoint" in last
    assert run.none_left(), run.left()
    report = hang_report(run)
    processes = [line for line in report.splitlines() if line.startswith("== ") and name in line]
    assert len([line for line in processes if ", stopped, " in line]) == 1, processes
    assert "no Python stack" not in "".join(line for line in report.splitlines() if name in line)
    assert kind == "RolloutActor" or "requests at the engine: 0" in report


@pytest.mark.slow
def test_a_rank_that_is_stuck_ends_the_run_with_the_stacks_of_all(launch):
    """It shows signs of life, and its peer waits for it in a collective operation."""
    stuck = ["--custom-advantage-function-path", "launch_rewards:stuck_rank"]
    run = launch("stuck_rank", *stuck, "--wait-timeout", "120", ranks=2)
    assert run.wait() == 1
    last = run.err.splitlines()[-1]
    assert "a step of the run has not ended within 120 s (--wait-timeout)" in last
    doing = dict(line.split(" (process ") for line in hang_report(run).splitlines() if line.startswith("trainer rank"))
    assert "in stuck_rank" in doing["trainer rank 1"]
    assert "in the collective " in doing["trainer rank 0"]
    assert run.none_left(), run.left()


@pytest.mark.slow
def test_a_run_restarts_after_a_stopped_trainer(held, workplace):
    run = held("restarted", "--worker-timeout", "5", "--max-restarts", "1", ranks=2)
    assert run.kill_worker("TrainActor", signal.SIGSTOP)
    assert run.wait() == 0, run.err
    assert "restarting from its last checkpoint (0 restarts left)" in run.err
    assert_each_prompt_trained_on_once(run, workplace, "restarted")
