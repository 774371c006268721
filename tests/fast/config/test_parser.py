"""Flags become settings, and wrong flags are reported."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.base.flags import LARGEST, FlagError
from miles.compat.border import parse_or_exit
from miles.config.parser import build_parser, declared, parse
from miles.config.settings import SECTIONS, Settings
from tests.fast.support.rows import rows


def test_no_flags_are_the_defaults():
    assert parse([]) == Settings(**{name: section() for name, section in SECTIONS.items()})


def test_flag_names_are_unique_over_the_sections():
    assert len(declared()) == sum(len(dataclasses.fields(section)) for section in SECTIONS.values())


@given(
    lr=st.floats(allow_nan=False),
    prompts=st.integers(-LARGEST, LARGEST),
    tokens=st.lists(st.integers(-LARGEST, LARGEST), min_size=1),
    colocate=st.booleans(),
)
def test_values_arrive_as_typed(lr, prompts, tokens, colocate):
    words = [f"--lr={lr!r}", f"--rollout-batch-size={prompts}", *(["--colocate"] if colocate else [])]
    settings = parse([*words, "--rollout-stop-token-ids", *map(str, tokens)])
    assert settings.optimizer.lr == lr
    assert settings.rollout.rollout_batch_size == prompts
    assert settings.rollout.rollout_stop_token_ids == tuple(tokens)
    assert settings.cluster.colocate is colocate


def test_a_file_of_flags(tmp_path):
    file = tmp_path / "run.flags"
    file.write_text('--lr 1e-5 --colocate  # both\n\n# a comment\n--output-dir "two words"\n--seed 3\n')
    settings = parse([f"@{file}", "--seed", "4"])
    assert settings.optimizer.lr == 1e-5
    assert settings.cluster.colocate
    assert settings.tracking.output_dir == "two words"
    assert settings.training.seed == 4, "the last one given counts"


def test_a_path_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("output_dir: ~/run\neval_prompt_data: {held: ~/held.jsonl}\n")
    settings = parse(["--config", str(tmp_path / "run.yaml"), "--prompt-data=~/rows.jsonl", "--save", "a~/b"])
    assert settings.tracking.output_dir == f"{tmp_path}/run"
    assert settings.evaluation.eval_prompt_data == ("held", f"{tmp_path}/held.jsonl")
    assert (settings.data.prompt_data, settings.checkpoint.save) == (f"{tmp_path}/rows.jsonl", "a~/b")


@pytest.mark.parametrize(("words", "sentence"), rows(__file__, "test_wrong_flags_are_one_line_and_exit_code_2"))
def test_wrong_flags_are_one_line_and_exit_code_2(words, sentence, command, capsys):
    with pytest.raises(FlagError):
        parse(words.split())
    with pytest.raises(SystemExit) as caught:
        parse_or_exit(command(words))
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert sentence in printed.err


def test_a_file_of_settings_without_its_flag_is_the_only_error():
    with pytest.raises(FlagError) as caught:
        parse(["run.yaml", "--bf17"])
    assert caught.value.messages == ("run.yaml belongs to no flag; give --config run.yaml",)


def test_all_errors_are_reported_at_once_whatever_finds_them(command, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_or_exit(
            command(
                "--lr fast --seed x --rolout-batch-size 3 --loss-aggregation mean --xyzzy --eps-clip 0 "
                "--buffer-sort-by-staleness"
            )
        )
    assert caught.value.code == 2
    first, *errors = capsys.readouterr().err.splitlines()
    assert first == "miles train: 7 errors in the flags:"
    assert [error.split(":")[0] for error in errors if error.startswith("    ")] == [
        "    --loss-aggregation mean",
        "    --eps-clip 0.0",
        "    --lr fast",
        "    --seed x",
        "    --buffer-sort-by-staleness",
        "    --rolout-batch-size",
        "    --xyzzy",
    ]
    groups = [error for error in errors if not error.startswith("    ")]
    assert groups == ["  loss:", "  optimizer:", "  training:", "  flags of other launchers:", "  no such flag:"]


def test_a_value_that_cannot_be_read_is_not_missing_as_well(command, capsys):
    with pytest.raises(SystemExit):
        parse_or_exit(command("--rollout-batch-size many", without="--rollout-batch-size"))
    assert capsys.readouterr().err.count("--rollout-batch-size") == 1


def test_bad_quotes_in_a_file_of_flags(tmp_path):
    (tmp_path / "f").write_text("--output-dir 'open\n")
    with pytest.raises(FlagError, match="check its quotes"):
        parse([f"@{tmp_path / 'f'}"])


def test_help_has_every_flag_and_section(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_or_exit(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(f"\n{name}:" in text for name in SECTIONS)
    assert all(option in text for option in build_parser()._option_string_actions)
    assert "in (0, 1]; default: 0.2)" in text


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_or_exit(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("miles ")
