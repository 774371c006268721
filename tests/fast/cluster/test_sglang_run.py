"""``train.py --rollout-engine sglang``: real Ray, a real SGLang server, a real trainer."""

import pytest

# Starting a server takes 12 s on two idle cores, and minutes on busy ones.
pytestmark = pytest.mark.timeout(900)

SGLANG = ["--rollout-engine", "sglang", "--sglang-max-total-tokens", "4096", "--sglang-max-running-requests", "32"]


@pytest.fixture(scope="module")
def whole(launch):
    run = launch("sglang", *SGLANG, "--check-weight-update-equal", "--num-rollout", "3")
    assert run.wait() == 0, run.err
    return run


def test_every_step_learns_from_what_the_server_generates(whole):
    rows = whole.rows()
    assert sorted(rows) == list(range(1, 7))
    assert all(row["train/grad_norm"] > 0 for row in rows.values())


def test_log_probs_of_server_and_trainer_agree(whole):
    """In the first step of each rollout, before the trainer's weights move on: fp32, to 1e-4."""
    assert all(whole.rows()[step]["train/train_rollout_logprob_abs_diff"] < 1e-4 for step in (1, 3, 5))


def test_each_engine_has_a_log(whole):
    assert "update_weights_from_distributed" in (whole.output / "engines" / "engine_0.log").read_text()


def test_no_process_is_left(whole):
    assert whole.none_left()


def test_wrong_value_for_the_server_is_told_with_its_log(launch):
    run = launch("refused", *SGLANG, "--sglang-attention-backend", "nonesuch")
    assert run.wait() == 1
    assert "engine_0.log ends:" in run.err and "invalid choice: 'nonesuch'" in run.err
    assert run.none_left()
