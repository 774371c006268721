"""What other trainers write and has no counterpart here is refused with what to give, also from a file of settings."""

import pytest

from miles.base.flags import FlagError
from miles.compat.border import read_command
from miles.compat.spellings import COUNTERPARTS, INSTEAD_OF_VALUES
from miles.compat.verdicts import FOREIGN_FLAGS, rows
from miles.config.megatron.fields import megatron_fields
from miles.config.parser import build_parser, judge
from tests.fast.config.conftest import minimal


@pytest.mark.parametrize("spelled", [str, lambda flag: "--" + flag[2:].replace("-", "_")])
def test_every_flag_of_another_trainer_is_refused_with_ours(refusals, spelled):
    rest = "miles translate FILE translates a whole script of TRL, verl or OpenRLHF"
    expected = {f"{spelled(flag)}: no such flag; give {here}; {rest}" for flag, here in COUNTERPARTS.items()}
    assert {*refusals(" ".join(f"{spelled(flag)} 3" for flag in COUNTERPARTS))} == expected


@pytest.mark.parametrize(("words", "instead"), INSTEAD_OF_VALUES.items())
def test_a_value_of_another_trainer_is_refused_with_ours(refusals, words, instead):
    assert refusals(words) == (f"{words}: no such choice; {instead}",)


def test_a_file_of_settings_may_hold_what_other_launchers_name(tmp_path):
    (tmp_path / "run.yaml").write_text("log_interval: 3\nnum_generations: 8\nuse_mopd: true\n")
    with pytest.raises(FlagError) as caught:
        judge(read_command(["--config", str(tmp_path / "run.yaml"), *minimal()]))
    assert [message.split(":")[0] for message in caught.value.messages] == ["--num-generations", "--use-mopd"]
    assert all(f"run.yaml:{line}" in text for line, text in zip((2, 3), caught.value.messages, strict=True))


def test_errors_in_foreign_and_own_words_are_reported_together(refusals):
    messages = refusals("--use-lora --lr x --profile-target")
    assert [message.split()[0].rstrip(":") for message in messages] == ["--profile-target", "--lr"]


def test_a_flag_has_one_verdict():
    flags = [row.flag for name in ("launcher", "megatron", "training") for row in rows(name)]
    assert len(flags) == len({*flags}) == len(FOREIGN_FLAGS)


def test_flags_of_other_trainers_do_not_exist_and_their_counterparts_do():
    known = {*build_parser()._option_string_actions, *FOREIGN_FLAGS, *(f.flag for f in megatron_fields().values())}
    counterparts = {word.rstrip(",") for text in COUNTERPARTS.values() for word in text.split() if word[:2] == "--"}
    assert (
        counterparts <= known | {"--sglang-mem-fraction-static", "--help", "--config"} and not {*COUNTERPARTS} & known
    )
