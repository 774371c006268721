"""Values are read as people write them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.commands import train
from miles.config.parser import parse
from miles.config.suggest import whole_numbers
from tests.fast.config.conftest import QWEN3

LAYERS = QWEN3 | dict(
    model_type="qwen3_moe",
    num_hidden_layers=6,
    rms_norm_eps=1e-5,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    mlp_only_layers=[0, 2, 4],
)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=9))
def test_lists_of_numbers_in_every_spelling(numbers):
    joined = ",".join(map(str, numbers))
    for text in (json.dumps(numbers), f"({joined},)", f"[{joined}]", " + ".join(f"[{n}]*1" for n in numbers)):
        assert whole_numbers(text) == numbers


@pytest.mark.parametrize(
    "text",
    ["", "x", "[1", "__import__('os')", "[1]*1.5", "[[1]]", "[1]*99999999", "9**9", "f(1)", "[]", "[0]*-1", "[0]*0"],
)
def test_anything_else_is_no_list(text):
    with pytest.raises(ValueError, match="not a list of whole numbers"):
        whole_numbers(text)


@pytest.mark.parametrize("written", ["[0,1,0,1,0,1]", "[0,1]*3", "([0]+[1])*3", "0,1,0,1,0,1", "0 1 0 1 0 1"])
def test_layer_pattern(accepted, refusals, tmp_path, written):
    (tmp_path / "config.json").write_text(json.dumps(LAYERS))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(LAYERS | {"mlp_only_layers": [0]}))
    assert accepted(f"--hf-checkpoint {tmp_path} --moe-layer-freq {written}")
    (message,) = refusals(f"--hf-checkpoint {tmp_path}/other --moe-layer-freq {written}")
    assert "contradicts --hf-checkpoint" in message


def test_experts_in_every_layer(accepted, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LAYERS | {"mlp_only_layers": []}))
    assert accepted(f"--hf-checkpoint {tmp_path} --moe-layer-freq 1")


def test_no_layer_pattern(refusals):
    (message,) = refusals("--moe-layer-freq dense")
    assert message == "--moe-layer-freq dense: must be a list of whole numbers; write 1,1 or [0]*3+[1]*5"


@pytest.mark.parametrize("words", [["5", "6"], ["5,6"], ["[5,6]"], ["[5, 6]"], ["[5]", "6"]])
def test_numbers_of_our_own_flags(words):
    assert parse(["--rollout-stop-token-ids", *words]).rollout.rollout_stop_token_ids == (5, 6)
    if len(words) == 1:
        assert parse([f"--rollout-stop-token-ids={words[0]}"]).rollout.rollout_stop_token_ids == (5, 6)


def test_a_flag_and_its_value_as_one_word(command):
    settings = parse([*command(), "--lr 1e-5", "--tensor-model-parallel-size 2", "--sglang-load-format dummy"])
    assert settings.optimizer.lr == 1e-5
    assert settings.megatron.tensor_model_parallel_size == 2
    assert settings.server_flags.server == ("--load-format", "dummy")


def test_given_twice(accepted):
    (note,) = accepted("--lr 1e-6 --lr=1e-5 --seed 3 --seed 3").accepted
    assert "--lr 1e-6" in note.written and "--lr 1e-5: given twice, and the last value counts" in note.why
    assert accepted("--lr 1e-6 --lr 1e-5 --strict-flags"), "both are read; this is no flag without effect"


def test_a_flag_after_a_file_takes_its_place_without_a_note(accepted, tmp_path):
    (tmp_path / "a").write_text("--lr 1e-6\n--rollout-stop-token-ids 5 6 --seed 3")
    validated = accepted(f"@{tmp_path}/a --lr 2e-6 --rollout-stop-token-ids 7")
    assert not validated.accepted
    assert (validated.settings.optimizer.lr, validated.settings.rollout.rollout_stop_token_ids) == (2e-6, (7,))
    (tmp_path / "b").write_text("--lr 1e-6 --lr 3e-6 --seed 4")
    validated = accepted(f"--seed 5 @{tmp_path}/a @{tmp_path}/b")
    written = sorted(note.written for note in validated.accepted)
    assert written == ["--lr 1e-6", "--seed 5"], "twice in one source, or before it"
    assert (validated.settings.optimizer.lr, validated.settings.training.seed) == (3e-6, 4)


TRANSFER = "--rollout-engine sglang --update-weight-transfer-mode"


@pytest.mark.parametrize(
    ("flags", "section", "field", "value"),
    [
        (f"{TRANSFER} p2p", "sglang", "update_weight_transfer_mode", "broadcast"),
        (f"{TRANSFER}=p2p", "sglang", "update_weight_transfer_mode", "broadcast"),
        (
            "--eval-prompt-data hf:sets/aime --eval-interval 2",
            "evaluation",
            "eval_prompt_data",
            ("aime", "hf:sets/aime"),
        ),
        ("--fully-async", "rollout", "async_steps", 1),
        ("--fully-async --async-steps 2", "rollout", "async_steps", 2),
        ('--train-env-vars {"A":1,"B":"x","C":true}', "cluster", "train_env_vars", '{"A": "1", "B": "x", "C": "true"}'),
    ],
)
def test_read_as(accepted, flags, section, field, value):
    validated = accepted(flags)
    assert getattr(getattr(validated.settings, section), field) == value
    if "--async-steps" not in flags:
        assert any(note.heading == "read as" for note in validated.accepted)


def test_earlier_names_of_server_flags(accepted):
    validated = accepted("--device cuda --sglang-cuda-graph-bs 1 2 4 --sglang-nsa-prefill-backend flashmla_sparse")
    words = validated.settings.server_flags.server
    assert words == ("--cuda-graph-bs-decode", "1", "2", "4", "--dsa-prefill-backend", "flashmla_sparse")


def test_explain_prints_ascii_notes_once(command, capsys):
    with pytest.raises(SystemExit) as caught:
        train.main(command("--explain --kl-loss-coef 0.1 --num-layers 4"))
    assert caught.value.code == 0
    assert capsys.readouterr().out.count("--kl-loss-coef 0.1") == 1
