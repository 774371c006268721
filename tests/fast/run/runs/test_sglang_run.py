"""``train.py --rollout-engine sglang`` with real Ray, SGLang servers and trainer."""

import json

import pytest
from tolerance import SERVER_LOG_PROB_ERROR

from tests.fast.engine.sglang_servers import KEYS
from tests.fast.run.runs.launches import LOCAL_RAY, OF_SERVERS, is_loopback, kind_of

# The first test of the suite that needs the server starts it.
pytestmark = pytest.mark.timeout(900)

SGLANG = ["--rollout-engine", "sglang"]
SERVERS = [*SGLANG, "--sglang-max-total-tokens", "4096", "--sglang-max-running-requests", "32"]


def external(address):
    keys = ["--sglang-api-key", KEYS.server, "--sglang-admin-api-key", KEYS.admin]
    return [*SGLANG, "--rollout-external", "--rollout-external-engine-addrs", address, *keys]


@pytest.fixture(scope="module")
def whole(launch, sglang_address):
    """Generate in two workers, until the reward function fails in the fourth iteration."""
    flags = [*external(sglang_address), "--check-weight-update-equal", "--num-rollout-workers", "2"]
    run = launch("sglang", *flags, reward="raises", FAIL_AT="3")
    run.wait_until(run.has_rows)
    assert [kind_of(process) for process in run.left()].count("ray::GenerationActor") == 2
    assert run.wait() == 1, run.err
    return run


def assert_learns(run):
    rows = run.rows()
    assert sorted(rows) == list(range(1, 7))
    assert all(row["train/grad_norm"] > 0 for row in rows.values())
    # In the first step of each iteration, before the trainer's weights change: fp32.
    assert all(rows[step]["train/train_rollout_logprob_abs_diff"] < SERVER_LOG_PROB_ERROR for step in (1, 3, 5))


def test_every_step_learns_from_what_the_server_generates(whole):
    assert_learns(whole)


def test_an_error_in_a_worker_names_the_prompt_and_leaves_no_process(whole, workplace):
    assert whole.none_left()
    assert "KeyError: 'gold'" in whole.err
    assert f"prompt {workplace / 'prompts.jsonl'}:" in whole.err
    assert "--reward-error-value" in whole.err
    assert "the reward function failed (above)" in whole.err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disk", "broadcast", "ipc"])
@pytest.mark.parametrize("backend", [("fsdp", 2), ("megatron", 4)], ids=lambda backend: backend[0])
def test_weights_of_both_backends_arrive_by_each_transport(launch, sglang_address, backend, mode):
    """Megatron splits each tensor over two tensor-parallel ranks of two stages. Every update is checked by tensor."""
    name, ranks = backend
    split = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"] if name == "megatron" else []
    transport = ["--update-weight-transfer-mode", mode, "--check-weight-update-equal"]
    flags = [*external(sglang_address), *transport, "--train-backend", name, *split, "--num-rollout", "3"]
    run = launch(f"{name}_{mode}", *flags, ranks=ranks)
    assert run.wait() == 0, run.err
    assert_learns(run)


@pytest.mark.slow
def test_own_servers_are_started_routed_and_stopped(launch):
    """They have the keys that are given, listen on the loopback interface only, and show the keys nowhere."""
    secrets = ["open-sesame-1", "open-sesame-2", "open-sesame-3"]
    keys = zip(["--sglang-api-key", "--sglang-admin-api-key", "--router-api-key"], secrets, strict=True)
    words = [word for pair in keys for word in pair]
    run = launch("servers", *SERVERS, *words, "--rollout-num-gpus", "2", "--num-rollout", "3")
    run.wait_until(run.has_rows)
    assert not [word for _, words in run.command_lines() for word in words if "sesame" in word]
    listening = run.listening()
    assert listening.keys() <= LOCAL_RAY | OF_SERVERS and listening.keys() >= OF_SERVERS, listening
    assert all(is_loopback(address) for addresses in listening.values() for address in addresses), listening
    assert run.wait() == 0, run.err
    assert_learns(run)
    names = ("run.json", "report.html", "engines/engine_0.log", "engines/engine_1.log", "engines/router.log")
    assert not any(secret in (run.output / name).read_text() for name in names for secret in secrets)
    for number in range(2):
        log = (run.output / "engines" / f"engine_{number}.log").read_text()
        assert "update_weights_from_distributed" in log and "POST /generate" in log
    assert run.none_left()


@pytest.mark.slow
def test_wrong_value_for_the_server_is_reported_with_its_log(launch):
    run = launch("refused", *SERVERS, "--sglang-json-model-override-args", '{"num_hidden_layers": "nonesuch"}')
    assert run.wait() == 1
    assert "engine_0.log ends:" in run.err and "nonesuch" in run.err
    assert run.none_left()


@pytest.mark.slow
@pytest.mark.parametrize("held", [42, 43])
def test_a_server_that_ends_is_reported_while_another_still_starts(launch, held):
    run = launch(f"half_{held}", *SERVERS, "--rollout-num-gpus", "2", "--rollout-seed", "42", HOLD_SERVER=str(held))
    assert run.wait() == 1
    assert f"engine_{1 - (held - 42)}.log ends:" in run.err and "this device is broken" in run.err
    assert run.none_left(), run.left()


MODES = {
    "fully": ["--async-steps", "1", "--fully-async"],
    "partial": ["--partial-rollout", "--over-sampling-batch-size", "8"],
    "early": ["--over-sampling-early-stop", "--over-sampling-batch-size", "8"],
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_rollouts_that_do_not_wait_for_the_last_response(launch, workplace, sglang_address, mode):
    """Run with tokens of several versions and aborted requests on a real server; train on each prompt once."""
    name = f"sglang_{mode}"
    saved = ["--save-debug-rollout-data", str(workplace / (name + "_{rollout_id}.jsonl"))]
    flags = [*external(sglang_address), *saved, *MODES[mode], "--rollout-max-response-len", "40"]
    run = launch(name, *flags, reward="spread")
    assert run.wait() == 0, run.err
    rows = run.rows()
    assert sorted(rows) == list(range(1, 13))
    assert all(row["train/train_rollout_logprob_abs_diff"] < 0.5 for row in rows.values())
    taken = []
    for r in range(6):
        for line in (workplace / f"{name}_{r}.jsonl").read_text().splitlines():
            group = json.loads(line)
            taken.append(group["group_index"])
            versions = {version for sample in group["samples"] for version in sample["weight_versions"]}
            assert versions <= ({r} if mode == "early" else {r - 1, r} if mode == "fully" else set(range(r + 1)))
    assert len(set(taken)) == len(taken) == 6 * 4
    assert run.none_left()
