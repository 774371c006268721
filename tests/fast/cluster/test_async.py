"""``--async-steps``: rollouts generated beside training by weights of known age, and no prompt lost to a kill."""

import json
import math

import pytest

STEPS, BATCH, ROLLOUTS = 2, 4, 5


def groups_by_rollout(folder, name, rollouts=ROLLOUTS):
    """The groups that each rollout trained on, as ``--save-debug-rollout-data`` keeps them."""
    files = [folder / f"{name}_{r}.jsonl" for r in range(rollouts)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def versions(groups):
    return {version for group in groups for sample in group["samples"] for version in sample["weight_versions"]}


@pytest.fixture(scope="module")
def resumed(launch, workplace):
    """A run of one rollout ahead, whose rollout worker is killed in rollout 3; it goes on from the checkpoint."""
    held, checkpoints = workplace / "ahead.held", workplace / "ahead_checkpoints"
    flags = ["--async-steps", "1", "--num-rollout", str(ROLLOUTS), "--save", str(checkpoints), "--save-interval", "1"]
    flags += ["--use-tis", "--max-restarts", "1"]
    flags += ["--eval-prompt-data", "held", str(workplace / "prompts.jsonl"), "--eval-interval", "2"]
    flags += ["--save-debug-rollout-data", str(workplace / "ahead_{rollout_id}.jsonl")]
    run = launch("ahead", *flags, HOLD_AT="3", HELD=str(held))
    run.wait_until(lambda: held.exists() and (checkpoints / "iter_0000003").exists())
    assert run.kill_worker("RolloutActor")
    assert run.wait() == 0, run.err
    return run


@pytest.mark.timeout(300)
def test_no_prompt_is_lost_or_taken_twice(resumed, workplace):
    groups = groups_by_rollout(workplace, "ahead")
    assert [group["group_index"] for rollout in groups for group in rollout] == list(range(ROLLOUTS * BATCH))


def test_rollout_r_has_the_weights_of_the_step_before(resumed, workplace):
    by = [versions(rollout) for rollout in groups_by_rollout(workplace, "ahead")]
    assert by == [{0}, {0}, {1}, {3}, {3}]  # the resumed run begins with the weights of its checkpoint, version 3
    rows = [resumed.rows()[STEPS * (r + 1)] for r in range(ROLLOUTS)]
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 0, 1]
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 1, 0, 1]


def test_stale_samples_are_corrected_by_the_log_probs_of_their_generation(resumed):
    """Those of the engine are the trainer's where the weights are the same, and others where they are older."""
    first_steps = [resumed.rows()[STEPS * r + 1] for r in range(ROLLOUTS)]
    gaps = [row["train/train_rollout_logprob_abs_diff"] for row in first_steps]
    assert [gap > 1e-4 for gap in gaps] == [False, True, True, False, True]
    assert [abs(row["train/tis"] - 1) > 1e-5 for row in first_steps] == [False, True, True, False, True]


def test_the_resumed_run_is_whole(resumed):
    rows = resumed.rows()
    assert sorted(rows) == list(range(1 + ROLLOUTS * STEPS))
    assert [step for step, row in rows.items() if "eval/held/accuracy" in row] == [0, 4, 8, 10]
    assert all(math.isfinite(value) for row in rows.values() for value in row.values())
    assert "the rollout worker died" in resumed.err
    assert "restarting from its last checkpoint (0 restarts left)" in resumed.err
    assert resumed.none_left()
