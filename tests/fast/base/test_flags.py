"""Checks of flags: collected for a command line, raised at once for a single value."""

import dataclasses
import math
from dataclasses import dataclass

import pytest

from miles.base.flags import Errors, FlagError, collect_errors, count, flag, flag_rules, refuse


@dataclass(frozen=True)
class Section:
    """section: three flags."""

    rate: float = flag(0.5, "a number", within="(0, 1]")
    size: int | None = flag(None, "a count", at_least=1)
    mode: str = flag("fast", "a choice", choices=("fast", "slow"))


def test_all_broken_rules_are_collected_and_none_is_repeated():
    with pytest.raises(FlagError) as caught, collect_errors() as errors:
        for _ in range(2):
            errors.declared(Section(rate=-1, size=0))
        assert errors.words(Section(mode="odd")) == Section(), "later rules see the default"
    assert caught.value.messages == (
        "--rate -1: must be in (0, 1]; give a number from 0 to 1, but not 0",
        "--size 0: must be a finite number of at least 1; give 1 or more",
        "--mode odd: no such choice; give one of fast, slow",
    )
    assert str(caught.value).count("\n") == 2


@pytest.mark.parametrize(
    ("rate", "is_refused"), [(0.0, True), (1e-9, False), (1, False), (1.1, True), (math.nan, True)]
)
def test_an_interval_has_its_ends(rate, is_refused):
    errors = Errors()
    errors.declared(Section(rate=rate))
    assert len(errors.messages) == is_refused


def test_what_a_flag_accepts_and_needs_is_shown():
    assert flag_rules(dataclasses.fields(Section)[0]) == ["in (0, 1]"]
    assert flag_rules(dataclasses.fields(Section)[1]) == ["at least 1"]


def test_rules_ask_whether_a_value_has_an_error():
    errors = Errors()
    errors.refuse("size_in_tokens", 3, "is odd", "give 4")
    assert not errors.none_about("rate", "size_in_tokens")
    assert errors.none_about("rate", "size"), "a longer name that begins the same is another flag"


def test_errors_of_a_block_that_raises_are_collected():
    errors = Errors()
    with errors.catching(), collect_errors() as inner:
        inner.refuse("rate", 1, "is wrong", "drop it")
        inner.refuse("size", 2, "is wrong", "drop it")
    with errors.catching():
        raise ValueError("--mode: is wrong; drop it")
    assert [message.split()[0] for message in errors.messages] == ["--rate", "--size", "--mode:"]


def test_a_single_value_is_refused_at_once():
    with pytest.raises(FlagError, match="^--size 3 4: is a pair; give one number$"):
        refuse("size", (3, 4), "is a pair", "give one number")


def test_counts():
    assert [count(n, "trajectory") for n in (1, 2)] == ["1 trajectory", "2 trajectories"]
    assert count(0, "step") == "0 steps"
