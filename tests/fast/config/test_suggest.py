"""A suggestion is related to the flag that does not exist, and never its opposite."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.compat.verdicts import FOREIGN_FLAGS
from miles.config.megatron.fields import megatron_fields
from miles.config.parser import build_parser
from miles.config.suggest import near_choice, nearest_flag, suggestion
from tests.fast.support.rows import rows

KNOWN = sorted({*build_parser()._option_string_actions, *FOREIGN_FLAGS, *(f.flag for f in megatron_fields().values())})


@pytest.mark.parametrize(("flag", "expected"), rows(__file__, "test_suggestion"))
def test_suggestion(flag, expected):
    assert suggestion(flag, KNOWN) == expected


@given(st.sampled_from(KNOWN), st.sampled_from(["no", "disable"]))
def test_never_the_opposite(flag, negative):
    opposite = f"--{negative}-{flag.removeprefix('--')}"
    assert flag + "?" not in suggestion(opposite, KNOWN)
    if flag.startswith("--no-"):
        assert f"{flag}?" not in suggestion("--" + flag.removeprefix("--no-"), KNOWN)


WORDS = Counter(word for flag in KNOWN for word in {*flag.removeprefix("--").split("-")})
SAY_NOTHING = {
    "num",
    "size",
    "path",
    "dir",
    "type",
    "max",
    "min",
    "use",
    "per",
    "custom",
    "id",
    "no",
    "enable",
    "disable",
}


@pytest.mark.parametrize("word", sorted(word for word, flags in WORDS.items() if flags > 4 and word not in SAY_NOTHING))
def test_a_word_of_many_flags_alone_suggests_none_of_them(word):
    """Unless the other words of the flag say nothing, or the word has an s too much."""
    near_flag = nearest_flag(f"--num-{word}", [name for name in KNOWN if name != f"--num-{word}"])
    words = {other.rstrip("s") for other in (near_flag or "--num").removeprefix("--").split("-")}
    assert words - SAY_NOTHING <= {word.rstrip("s")}, near_flag


@pytest.mark.parametrize(
    ("value", "expected"),
    [("sft", "sft_loss"), ("polcy_loss", "policy_loss"), ("loss", None), ("", None), ("dpo", None)],
)
def test_a_choice_is_meant_by_its_part_or_with_a_typing_error(value, expected):
    assert near_choice(value, ["policy_loss", "sft_loss", "value_loss"]) == expected


def test_what_was_meant_is_what_the_other_flags_are_checked_with(refusals):
    """Without it, each flag of fine-tuning would be refused alongside the policy loss, which is the default."""
    messages = refusals(
        "--loss-type sft --prompt-data rows.jsonl --debug-train-only --disable-compute-advantages-and-returns",
        without="--prompt-data --rm-type --n-samples-per-prompt --rollout-max-response-len",
    )
    assert {message.split(":")[0] for message in messages} == {"--loss-type sft"}
    assert "--loss-type sft: no such choice; did you mean sft_loss? Else give one of" in " ".join(messages)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--promt-data rows.jsonl", "--prompt-data"),
        ("--rm-typ math", "--rm-type"),
        ("--num-rollouts 3", "--num-rollout"),
    ],
)
def test_a_required_flag_with_a_typing_error_is_one_error(refusals, written, meant):
    (message,) = refusals(written, without=meant)
    assert message == f"{written.split()[0]}: no such flag; did you mean {meant}?"


def test_a_required_flag_that_is_not_suggested_is_still_missing(refusals):
    messages = refusals("--promt-data rows.jsonl", without="--prompt-data --hf-checkpoint")
    assert {message.split()[0] for message in messages} == {"--promt-data:", "--hf-checkpoint"}


def test_a_suggested_flag_that_is_refused_says_what_to_do(refusals):
    (message,) = refusals("--max-staleness 1")
    assert message.endswith(
        "did you mean --max-weight-staleness? It is refused here: give it as --async-steps, with --fully-async"
    )
