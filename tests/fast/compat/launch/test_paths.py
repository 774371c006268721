"""Functions inside the packages of other launchers are mapped to ours, or refused with the signature to write."""

import re
from dataclasses import fields

import pytest

from miles.base.flags import flag_name
from miles.base.user_code import load_function
from miles.compat.spellings import FLAGS_INSTEAD, KNOWN
from miles.config.explain import explain
from miles.config.functions import HOOKS
from miles.config.notes import READ_AS
from miles.config.settings import SECTIONS
from tests.fast.support.rows import rows


def test_every_known_function_of_ours_exists():
    for (flag, _), ours in KNOWN.items():
        assert flag in map(flag_name, HOOKS)
        assert ours is None or load_function(ours, flag)


def test_a_run_with_functions_of_the_user_says_where_they_run(accepted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def marked(args, groups): ...\n")
    text = explain(accepted("--rollout-sample-filter-path mine:marked"))
    line = "--rollout-sample-filter-path mine:marked: runs in the rollout process, once per iteration; it may change"
    assert line in " ".join(text.split())
    assert "Your functions" not in explain(accepted())


@pytest.mark.parametrize("package", ["miles", "slime"])
@pytest.mark.parametrize("colon", [".", ":"])
def test_known_filter(accepted, package, colon):
    path = f"{package}.rollout.filter_hub.dynamic_sampling_filters{colon}check_reward_nonzero_std"
    settings = accepted(f"--dynamic-sampling-filter-path {path}").settings
    assert settings.rollout.dynamic_sampling_filter_path == "miles.rollout.filters:check_reward_nonzero_std"


def test_their_default_is_our_default(accepted):
    settings = accepted("--rollout-function-path slime.rollout.sglang_rollout.generate_rollout").settings
    assert settings.rollout.rollout_function_path is None


THEIR_WEIGHTS = ["slime.backends.megatron_utils.loss", "miles.backends.training_utils.loss_hub.corrections"]


@pytest.mark.parametrize("module", THEIR_WEIGHTS)
@pytest.mark.parametrize(("name", "ours"), [("vanilla_tis_function", ""), ("icepop_function", "--tis-mode icepop")])
def test_their_importance_weights_are_ours(accepted, module, name, ours):
    flags = "--use-tis --tis-clip-low 0.5 --tis-clip 3"
    read = accepted(f"{flags} --custom-tis-function-path {module}.{name}")
    assert read.settings == accepted(f"{flags} {ours}").settings
    assert any(note.written.startswith("--custom-tis-function-path") for note in read.accepted)


@pytest.mark.parametrize(
    ("flags", "bounds"),
    [
        ("--advantage-estimator cispo", "--ratio-min 0.8 --ratio-max 1.2"),
        ("--advantage-estimator=cispo --eps-clip 1.0 --eps-clip-high 4", "--ratio-min 0 --ratio-max 5"),
        ("--advantage-estimator cispo --eps-clip 10 --disable-grpo-std-normalization", "--ratio-min 0 --ratio-max 11"),
    ],
)
def test_their_estimator_cispo_is_a_policy_loss_here(accepted, flags, bounds):
    std = "--disable-grpo-std-normalization" * flags.endswith("std-normalization")
    ours = accepted(f"--advantage-estimator grpo --policy-loss cispo {bounds} {std}")
    assert accepted(flags).settings == ours.settings


@pytest.mark.parametrize(
    ("flags", "ours"),
    [
        ("--weight-decay 0.1", "--lora-rank 64 --lora-alpha 128 --weight-decay 0"),
        (
            "--lora-rank 8 --lr 1e-6 --lora-learning-rate 1e-5 --lora-weight-decay 0.1",
            "--lora-rank 8 --lora-alpha 128 --lr 1e-5 --weight-decay 0.1",
        ),
        ("--lora-rank 8 --lora-alpha 16 --lora-bias none", "--lora-rank 8 --lora-alpha 16 --weight-decay 0"),
    ],
)
def test_the_adapter_of_slime_has_its_defaults(accepted, flags, ours):
    read = accepted(f"--train-backend fsdp --use-lora {flags}")
    assert read.settings == accepted(f"--train-backend fsdp {ours}").settings
    assert any(note.written == "--use-lora" and note.heading == READ_AS for note in read.accepted)


@pytest.mark.parametrize(
    "path",
    [
        "fully_async_rollout.generate_rollout_fully_async",
        "examples.fully_async.fully_async_rollout.generate_rollout_fully_async",
        "miles.rollout.fully_async_rollout.FullyAsyncRolloutFn",
    ],
)
def test_their_endless_generation_is_ours(accepted, path):
    result = accepted(f"--rollout-function-path {path} --rollout-num-gpus 1")
    rollout = result.settings.rollout
    assert (rollout.rollout_function_path, rollout.fully_async, rollout.async_steps) == (None, True, 1)
    assert any(note.why == "--fully-async --async-steps 1" for note in result.accepted)


@pytest.mark.parametrize("flags", ["", "--loss-aggregation token_mean", "--pg-loss-divisor 8"])
@pytest.mark.parametrize("name", ["", ".get_pg_loss_reducer", ":get_pg_loss_reducer"])
@pytest.mark.parametrize("folder", ["examples.DrGRPO", "examples.experimental.DrGRPO"])
def test_their_reducer_of_dr_grpo_is_a_mode_here(accepted, refusals, folder, name, flags):
    words = f"{flags} --custom-pg-loss-reducer-function-path {folder}.custom_reducer{name}"
    ours = "--loss-aggregation constant --loss-aggregation-divisor 1000"
    result = accepted(words)
    assert result.settings == accepted(ours).settings
    assert [note.why for note in result.accepted][-1] == ours
    assert [note.written.removesuffix(".0") for note in result.accepted][:-1] == [flags] * bool(flags)
    (message,) = refusals(f"{words} --calculate-per-token-loss")
    assert "would divide the normalization of --loss-aggregation constant away" in message


def test_no_age_of_samples_is_refused_with_endless_generation(refusals):
    path = "fully_async_rollout.generate_rollout_fully_async"
    for flags in ("--fully-async", f"--rollout-function-path {path}"):
        (message,) = refusals(f"{flags} --async-steps 0 --rollout-num-gpus 1")
        assert message.startswith("--fully-async: needs a limit on the age of samples")


@pytest.mark.parametrize(("flag", "path", "expected"), rows(__file__, "test_unknown_function"))
def test_unknown_function(refusals, flag, path, expected):
    (message,) = refusals(f"{flag} {path}", without="--rm-type" if "rm" in flag else "")
    assert message.startswith(f"{flag} {path}: this function is part of another launcher") and expected in message


def test_functions_of_the_user_are_left_alone(accepted, tmp_path, monkeypatch):
    assert accepted("--custom-rm-path my_rewards:reward", without="--rm-type")
    assert accepted("--dynamic-sampling-filter-path miles.rollout.filters:check_reward_nonzero_std").accepted == ()
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "mine.py").write_text("async def reward(samples): ...\n")
    monkeypatch.chdir(tmp_path)
    assert accepted("--custom-rm-path examples.mine.reward", without="--rm-type")


def test_flags_instead_name_flags_that_exist(command):
    from miles.config.parser import build_parser

    known = build_parser()._option_string_actions
    for what_to_do in FLAGS_INSTEAD.values():
        assert all(word.rstrip(",") in known for word in what_to_do.split() if word.startswith("--"))


@pytest.mark.parametrize("path", ["reward.py", "reward.py:score", "reward.py.score", "./reward.py:score"])
def test_a_file_is_no_module(refusals, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("async def score(samples): ...\n")
    (message,) = refusals(f"--custom-rm-path {path}", without="--rm-type")
    name = "score" if "score" in path else "NAME"
    assert "names a file, and a function is imported from a module" in message and f"write reward:{name}," in message


def test_a_module_may_be_called_py(accepted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "py.py").write_text("async def score(samples): ...\n")
    assert accepted("--custom-rm-path reward.py:score", without="--rm-type")


@pytest.mark.parametrize("field", HOOKS)
def test_a_function_that_its_module_lacks_is_refused(refused, field):
    flag, path = flag_name(field), "miles.rollout.filters:check_reward_nonzero_sdt"
    kind = "class" if HOOKS[field].signature.startswith("class") else "function"
    fault = f"{flag} {path}: module miles.rollout.filters has no {kind} check_reward_nonzero_sdt; did you mean "
    of_evaluation = "--eval-interval 5" + " --eval-prompt-data a b" * (field != "eval_function_path")
    beside = {  # without it, the flag has no effect
        "buffer_filter_path": "--partial-rollout",
        "custom_tis_function_path": "--use-tis",
        "eval_function_path": of_evaluation,
        "custom_eval_rollout_log_function_path": of_evaluation,
    }.get(field, "")
    assert any(message.startswith(fault) for message in refused(f"{flag} {path} {beside}"))


@pytest.mark.parametrize(("environment", "fault"), rows(__file__, "test_what_an_environment_imports_is_checked"))
def test_what_an_environment_imports_is_checked(refusals, environment, fault):
    (message,) = refusals(f"--environment {environment} --apply-chat-template --rollout-max-context-len 128")
    assert message.startswith(fault)


def test_every_flag_that_takes_an_import_path_is_checked():
    helps = {field.name: field.metadata["help"] for cls in SECTIONS.values() for field in fields(cls)}
    named = {name for name, text in helps.items() if name.endswith("_path") or re.search("module:[fc]", text)}
    assert named == {*HOOKS, "environment", "custom_config_path"}  # the last names a file
