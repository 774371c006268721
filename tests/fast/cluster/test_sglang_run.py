"""``train.py --rollout-engine sglang``: real Ray, a real SGLang server, a real trainer."""

import json

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


MODES = {
    "fully": ["--async-steps", "1", "--fully-async"],
    "partial": ["--partial-rollout", "--over-sampling-batch-size", "8"],
    "early": ["--over-sampling-early-stop", "--over-sampling-batch-size", "8"],
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_rollouts_that_do_not_wait_for_the_last_response(launch, workplace, mode):
    """Tokens of several versions, aborts and given-up requests, by a real server; training takes each prompt once."""
    name = f"sglang_{mode}"
    saved = ["--save-debug-rollout-data", str(workplace / (name + "_{rollout_id}.jsonl"))]
    run = launch(name, *SGLANG, *saved, *MODES[mode], "--rollout-max-response-len", "40", reward="spread")
    assert run.wait() == 0, run.err
    rows = run.rows()
    assert sorted(rows) == list(range(1, 13))
    assert all(row["train/train_rollout_logprob_abs_diff"] < 0.5 for row in rows.values())
    taken = []
    for r in range(6):
        for line in (workplace / f"{name}_{r}.jsonl").read_text().splitlines():
            group = json.loads(line)
            taken.append(group["group_index"])
            found = {version for sample in group["samples"] for version in sample["weight_versions"]}
            assert found <= ({r} if mode == "early" else {r - 1, r} if mode == "fully" else set(range(r + 1)))
    assert len(set(taken)) == len(taken) == 6 * 4
    assert run.none_left()
