"""Complete runs that generate only, that train on conversations, and that repeat bit for bit."""

import hashlib
import json

import pytest

from tests.fast.run.runs.launches import OF_TIME

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ["--num-rollout", "2", "--global-batch-size", "16"]


def measured(run):
    """Return the metrics that do not depend on time."""
    return {
        step: {name: value for name, value in row.items() if not name.startswith(OF_TIME)}
        for step, row in run.rows().items()
    }


def test_without_a_trainer_answers_are_generated_evaluated_and_saved(launch, workplace):
    prompts = str(workplace / "prompts.jsonl")
    evaluation = ["--eval-prompt-data", "held", prompts, "--eval-interval", "1"]
    saved = ["--save-debug-rollout-data", str(workplace / "only_{iteration}.jsonl"), "--save", str(workplace / "never")]
    run = launch("rollout_only", "--debug-rollout-only", *SMALL, *evaluation, *saved)
    assert run.wait() == 0, run.err
    assert "--save" in run.out and "which trains and saves nothing" in run.out
    rows = measured(run)
    assert sorted(rows) == [0, 1, 2]
    assert not any(name.startswith("train/") for row in rows.values() for name in row)
    assert rows[0]["eval/held/reward"] == rows[1]["eval/held/reward"] == rows[2]["eval/held/reward"]
    assert len((workplace / "only_1.jsonl").read_text().splitlines()) == 4
    assert not (workplace / "never").exists()

    # An ordinary run begins with the same weights, so its first iteration is the same.
    ordinary = launch("rollout_and_training", *SMALL)
    assert ordinary.wait() == 0, ordinary.err
    first = measured(ordinary)[1]
    assert {name: first[name] for name in rows[1] if name.startswith("rollout/")} == {
        name: value for name, value in rows[1].items() if name.startswith("rollout/")
    }


def test_a_model_is_fine_tuned_on_conversations_without_an_engine(launch, workplace):
    rows = [{"chat": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "+ 7"}]} for n in range(8)]
    (workplace / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["--loss-type", "sft_loss", "--debug-train-only", "--n-samples-per-prompt", "1", "--input-key", "chat"]
    own += ["--prompt-data", str(workplace / "chats.jsonl"), "--rollout-batch-size", "8", "--global-batch-size", "8"]
    run = launch("sft", *own, "--num-rollout", "8", "--lr", "1e-2")
    assert run.wait() == 0, run.err
    by_step = measured(run)
    assert sorted(by_step) == list(range(1, 9))
    assert by_step[8]["train/loss"] < 0.5 * by_step[1]["train/loss"]
    assert by_step[1]["rollout/loss_tokens"] == 8 * 3  # "+", " 7" and the end of each answer


def test_two_runs_in_deterministic_mode_are_bit_equal(launch, workplace):
    digests, rows = [], []
    for number in range(2):
        folder = workplace / f"repeated_{number}"
        run = launch(folder.name, *SMALL, "--deterministic-mode", "--save-hf", str(folder / "hf"), ranks=2)
        assert run.wait() == 0, run.err
        digests.append(hashlib.sha256((folder / "hf" / "model.safetensors").read_bytes()).hexdigest())
        rows.append(measured(run))
    assert digests[0] == digests[1]
    assert rows[0] == rows[1]
