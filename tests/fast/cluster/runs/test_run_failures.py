"""Runs that end early: the exit status, the message on stderr, and no process left running."""

import pytest


@pytest.fixture(scope="module")
def failed(launch, workplace):
    """Start three runs that fail; in parallel, because each mostly waits for Ray.

    The first two fail before they would train, and start no trainer: it takes as much of the processor as the rest.
    """
    rows = (workplace / "prompts.jsonl").read_text().splitlines()
    (workplace / "malformed.jsonl").write_text("\n".join([*rows[:6], '{"input": nope}', *rows[7:]]))
    no_trainer = ["--debug-rollout-only"]
    runs = {
        "malformed": launch("malformed", *no_trainer, "--prompt-data", str(workplace / "malformed.jsonl")),
        "raises": launch("raises", *no_trainer, reward="raises"),
        "dies": launch("dies", "--save", str(workplace / "dies_ckpt"), "--save-interval", "1", reward="dies"),
    }
    statuses = {name: run.wait() for name, run in runs.items()}
    assert statuses == {"malformed": 2, "raises": 1, "dies": 1}, [run.err for run in runs.values()]
    return runs


def test_malformed_row_is_reported_in_one_sentence(failed, workplace):
    (error,) = failed["malformed"].said()
    assert error.startswith(f"train.py: error: {workplace / 'malformed.jsonl'}:7: not JSON")


def test_raising_reward_names_the_sample(failed, workplace):
    error = failed["raises"].err
    assert "KeyError: 'gold'" in error
    assert f"prompt {workplace / 'prompts.jsonl'}:" in error
    assert "--reward-error-value" in error


def test_reward_code_that_kills_its_process_is_reported_with_how_to_resume(failed, workplace):
    last = failed["dies"].err.splitlines()[-1]
    assert "launch_rewards:dies" in last and "SIGKILL" in last
    assert f"--load {workplace / 'dies_ckpt'}" in last


def test_failed_runs_leave_no_process(failed):
    assert all(run.none_left() for run in failed.values())


def test_ctrl_c_says_how_to_resume(launch, workplace):
    held, checkpoints = workplace / "ctrl_c.held", workplace / "ctrl_c_ckpt"
    saving = ["--save", str(checkpoints), "--save-interval", "1"]
    run = launch("ctrl_c", *saving, HOLD_AT="1", HELD=str(held))
    run.wait_until(held.exists)  # during a call of a reward function that does not return
    run.interrupt()
    assert run.wait() == 130, run.err
    assert run.err.splitlines()[-1].startswith("stopped by the user; the same command with --load")
    assert "Traceback" not in run.err
    assert run.none_left()
