"""``--async-steps``: rollouts generated beside training by weights of known age, and no prompt lost to a kill."""

import json
import math

import pytest

STEPS, BATCH, ROLLOUTS = 2, 4, 6


def groups_by_rollout(folder, name):
    """The groups that each rollout trained on, as ``--save-debug-rollout-data`` keeps them."""
    return {
        r: [json.loads(line) for line in (folder / f"{name}_{r}.jsonl").read_text().splitlines()]
        for r in range(ROLLOUTS)
    }


def versions(group):
    return {version for sample in group["samples"] for version in sample["weight_versions"]}


def indices(groups):
    return [group["group_index"] for rollout in groups.values() for group in rollout]


@pytest.fixture(scope="module")
def flags(workplace):
    def of(name, *more):
        sets = ["--eval-prompt-data", "held", str(workplace / "prompts.jsonl"), "--eval-interval", "3"]
        return [*sets, "--save-debug-rollout-data", str(workplace / (name + "_{rollout_id}.jsonl")), *more]

    return of


@pytest.fixture(scope="module")
def ahead(launch, flags):
    run = launch("ahead", *flags("ahead", "--async-steps", "1"))
    assert run.wait() == 0, run.err
    return run


def test_rollout_r_has_the_weights_of_the_step_before(ahead, workplace):
    groups = groups_by_rollout(workplace, "ahead")
    assert indices(groups) == list(range(ROLLOUTS * BATCH))
    for r, rollout in groups.items():
        assert {version for group in rollout for version in versions(group)} == {max(0, r - 1)}


def test_its_run_is_whole(ahead):
    rows = ahead.rows()
    assert sorted(rows) == list(range(1 + ROLLOUTS * STEPS))
    assert [step for step, row in rows.items() if "eval/held/accuracy" in row] == [0, 6, 12]
    assert all(math.isfinite(value) for row in rows.values() for value in row.values())
    assert ahead.err == ""
    assert ahead.none_left()


@pytest.mark.timeout(300)
def test_fully_async_after_a_kill_loses_no_prompt(launch, flags, workplace):
    held, checkpoints = workplace / "fully.held", workplace / "fully_checkpoints"
    same = flags("fully", "--async-steps", "1", "--fully-async", "--save", str(checkpoints), "--save-interval", "1")
    killed = launch("fully", *same, HOLD_AT="3", HELD=str(held))
    killed.wait_until(lambda: held.exists() and (checkpoints / "iter_0000002").exists())
    killed.kill()

    resumed = launch("fully", *same, "--load", str(checkpoints))
    assert resumed.wait() == 0, resumed.err
    rows, groups = resumed.rows(), groups_by_rollout(workplace, "fully")
    assert sorted(rows) == list(range(1 + ROLLOUTS * STEPS))
    taken = indices(groups)
    assert len(set(taken)) == len(taken) == ROLLOUTS * BATCH
    dropped = sum(row.get("rollout/dropped/stale", 0) for row in rows.values())
    # whatever was drawn and is not trained on was dropped for its age: nothing fell through
    assert dropped >= max(taken) + 1 - len(taken)
    for r, rollout in groups.items():
        assert all(r - 1 <= version <= r for group in rollout for version in versions(group))
