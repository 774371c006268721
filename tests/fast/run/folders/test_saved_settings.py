"""A run that resumes states which settings it has changed, and is refused at once if it cannot continue."""

import json
import shutil
from dataclasses import replace

import pytest

from miles.config.checkpoint import CheckpointArguments
from miles.config.parser import parse
from miles.config.validate import validate
from miles.run.resume import check_settings, settings_to_save
from tests.fast.config.conftest import minimal
from tests.fast.support.small_checkpoint import PROMPTS, save_checkpoint

ORDER = "--rollout-shuffle --rollout-seed 42"


def settings_of(flags="", without=""):
    return validate(parse(minimal(f"{ORDER} {flags}", without))).settings


@pytest.fixture
def saved(tmp_path):
    """Save a checkpoint of a run with these flags, and return what loads it."""

    def save(flags="", without="", **launcher):
        save_checkpoint(tmp_path / "run", 4, **{"settings": settings_to_save(settings_of(flags, without)), **launcher})
        return CheckpointArguments(load=str(tmp_path / "run"))

    return save


def test_the_same_settings_are_no_note(saved):
    assert check_settings(saved("--lr 1e-3"), settings_of("--lr 1e-3 --output-dir elsewhere")) == []


def test_settings_that_differ_are_noted_with_both_values(saved):
    loading = saved("--lr 1e-3")
    note, of_rate = check_settings(loading, settings_of("--lr 1e-4 --advantage-estimator rloo --num-rollout 20"))
    assert note == (
        f"--load {loading.load}: iter_0000004 was saved with other settings, and this run continues with its own: "
        "--num-rollout 10, now 20; --advantage-estimator grpo, now rloo; --lr 0.001, now 0.0001"
    )
    assert of_rate.startswith("the decay of --lr ends with the run")
    assert len(check_settings(loading, settings_of("--lr 1e-3 --num-rollout 20 --lr-decay-style constant"))) == 1


def test_limits_and_outputs_may_differ_without_a_note(saved, tmp_path):
    flags = f"--loss-canary always --save-debug-rollout-data {tmp_path}/{{rollout_id}}.jsonl"
    assert check_settings(saved(), settings_of(flags)) == []


def test_many_differences_are_counted(saved):
    flags = "--lr 1e-4 --num-rollout 20 --advantage-estimator rloo --eps-clip 0.3 --eps-clip-high 0.4 --seed 7"
    note, _ = check_settings(saved(), settings_of(f"{flags} --rollout-top-k 9 --entropy-coef 0.1 --weight-decay 0.2"))
    assert note.endswith("; and 1 more") and note.count(", now ") == 8


def test_secrets_are_not_saved():
    state = settings_to_save(settings_of("--rm-type remote_rm --rm-url http://u:letmein@h/score", "--rm-type"))
    assert "letmein" not in json.dumps(state)


def test_a_checkpoint_without_settings_and_a_new_run_are_no_note(saved):
    loading = saved(settings=None)
    assert check_settings(loading, settings_of("--lr 1e-4")) == []
    changed = settings_of("--lr 1e-4 --rollout-seed 7")
    assert check_settings(replace(saved(), finetune=True), changed) == []
    assert check_settings(CheckpointArguments(), changed) == []


def test_another_backend_is_refused(saved):
    other = settings_of("--train-backend megatron")
    for loading in (saved(), replace(saved(), finetune=True)):
        with pytest.raises(ValueError, match="iter_0000004 was written by --train-backend fsdp, whose format"):
            check_settings(loading, other)


@pytest.mark.parametrize("prompts", [PROMPTS, {"sets": {"one": PROMPTS}}])
def test_another_order_of_prompts_is_refused(saved, prompts):
    loading = saved(prompts=prompts)
    with pytest.raises(ValueError, match=r"--rollout-seed: .* seed 42, this run has seed 7, .* with --finetune"):
        check_settings(loading, settings_of("--rollout-seed 7"))
    with pytest.raises(ValueError, match="--rollout-shuffle: the checkpoint's position in the prompts is for shuffle"):
        check_settings(loading, validate(parse(minimal("--rollout-seed 42"))).settings)


@pytest.mark.parametrize("finetune", [False, True])
def test_another_model_is_refused(saved, tiny_model, tmp_path, finetune):
    other = shutil.copytree(tiny_model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"hidden_size": 2 * config["hidden_size"]}))
    loading = replace(saved(f"--hf-checkpoint {tiny_model}", "--hf-checkpoint"), finetune=finetune)
    with pytest.raises(ValueError, match=f"holds a model with hidden_size {config['hidden_size']}, and --hf-checkp"):
        check_settings(loading, settings_of(f"--hf-checkpoint {other}", "--hf-checkpoint"))


def test_another_tokenizer_is_refused(saved, tiny_model, tmp_path):
    other = shutil.copytree(tiny_model, tmp_path / "other")
    loading = saved(f"--hf-checkpoint {tiny_model}", "--hf-checkpoint")
    now = settings_of(f"--hf-checkpoint {other}", "--hf-checkpoint")
    (note,) = check_settings(loading, now)
    assert f"--hf-checkpoint {tiny_model}, now {other}" in note
    tokens = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(ValueError, match=rf"--hf-checkpoint {other}: its tokenizer.json has other ids for 2 of "):
        check_settings(loading, now)
