"""``--async-steps`` generates during training with weights of known age, a kill loses no prompt, and Ctrl-C ends it."""

import json
import math

import pytest

STEPS, BATCH, ROLLOUTS = 2, 4, 5


def groups_by_iteration(folder, name, rollouts=ROLLOUTS):
    """Return the groups that each iteration trained on, as saved by ``--save-debug-rollout-data``."""
    files = [folder / f"{name}_{r}.jsonl" for r in range(rollouts)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def versions(groups):
    return {version for group in groups for sample in group["samples"] for version in sample["weight_versions"]}


@pytest.fixture(scope="module")
def resumed(launch, workplace):
    """Run one iteration ahead, and kill the trainer while iteration 3 waits for a reward function that never returns.

    After ROLLOUTS iterations interrupt the resumed run, when it waits for such a function again.
    """
    held, checkpoints = workplace / "ahead.held", workplace / "ahead_checkpoints"
    flags = ["--async-steps", "1", "--num-rollout", "60", "--save", str(checkpoints), "--save-interval", "1"]
    flags += ["--use-tis", "--max-restarts", "1", "--stop-timeout", "2"]
    flags += ["--eval-prompt-data", "held", str(workplace / "prompts.jsonl"), "--eval-interval", "2"]
    flags += ["--save-debug-rollout-data", str(workplace / "ahead_{rollout_id}.jsonl")]
    run = launch("ahead", *flags, HOLD_AT="3", HELD=str(held))
    run.wait_until(lambda: held.exists() and (checkpoints / "iter_0000003").exists())
    assert run.kill_worker("TrainActor")
    last = checkpoints / f"iter_{ROLLOUTS:07d}"
    run.wait_until(lambda: last.exists() and ROLLOUTS * STEPS in run.rows())
    held.unlink()
    run.wait_until(held.exists)
    run.interrupt()
    run.wait()
    return run


@pytest.mark.timeout(900)
def test_no_prompt_is_lost_or_trained_on_twice(resumed, workplace):
    groups = groups_by_iteration(workplace, "ahead")
    assert [group["group_index"] for rollout in groups for group in rollout] == list(range(ROLLOUTS * BATCH))


def test_each_iteration_is_generated_by_the_weights_of_the_previous_one(resumed, workplace):
    by = [versions(rollout) for rollout in groups_by_iteration(workplace, "ahead")]
    assert by == [{0}, {0}, {1}, {3}, {3}]  # the resumed run starts with the weights of its checkpoint, version 3
    rows = [resumed.rows()[STEPS * (r + 1)] for r in range(ROLLOUTS)]
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 0, 1]
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 1, 0, 1]


def test_stale_samples_have_the_log_probs_of_their_weights(resumed):
    """Engine and trainer log-probs agree if the weights are the same, and differ if the engine's are older."""
    first_steps = [resumed.rows()[STEPS * r + 1] for r in range(ROLLOUTS)]
    gaps = [row["train/train_rollout_logprob_abs_diff"] for row in first_steps]
    assert [gap > 1e-4 for gap in gaps] == [False, True, True, False, True]
    assert [abs(row["train/tis"] - 1) > 1e-5 for row in first_steps] == [False, True, True, False, True]


def test_the_run_restarts_and_is_complete(resumed):
    rows = {step: row for step, row in resumed.rows().items() if step <= ROLLOUTS * STEPS}
    assert sorted(rows) == list(range(1 + ROLLOUTS * STEPS))
    assert [step for step, row in rows.items() if "eval/held/reward" in row] == [0, 4, 8]
    assert all(math.isfinite(value) for row in rows.values() for value in row.values())
    assert "trainer rank 0 died" in resumed.err
    assert "restarting from its last checkpoint (0 restarts left)" in resumed.err


def test_ctrl_c_says_how_to_resume(resumed, workplace):
    assert resumed.process.returncode == 130, resumed.err
    last = resumed.err.splitlines()[-1]
    assert last.startswith(f"stopped by the user; the same command with --load {workplace / 'ahead_checkpoints'}")
    assert "Traceback" not in resumed.err.partition("restarting from")[2]
    assert resumed.none_left()
