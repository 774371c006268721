from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.tasks.rewards.answer_text import plain_number
from miles.tasks.rewards.built_in import REWARDS
from miles.tasks.rewards.built_in.exact_match import ExactMatchFlags
from miles.tasks.rewards.built_in.last_number import find_last_number

exact_match, last_number, length = REWARDS["exact_match"], REWARDS["last_number"], REWARDS["length"]

padding = st.text(" \n\t", max_size=3)
words = st.text("abcxyz =,.!?$()\n", max_size=12)
decimals = st.decimals(-(10**9), 10**9, allow_nan=False, places=3)


@given(padding, st.text(min_size=1).filter(str.strip), padding)
def test_exact_match_ignores_surrounding_white_space_only(make_sample, left, text, right):
    assert exact_match([make_sample(left + text + right, text), make_sample(text + "x", text)]) == [1.0, 0.0]


def test_exact_match_of_several_labels_is_that_of_any(make_sample):
    responses = ["Paris", " 75 ", "Lyon", "paris", ""]
    assert exact_match([make_sample(r, ["Paris", 75]) for r in responses]) == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("the Eiffel Tower.", "Eiffel tower", 1),
        ("<think>Lyon?</think> It is <answer> Paris </answer>", ["Lutetia", "Paris"], 1),
        ("Tower Eiffel", "Eiffel Tower", 0),
        ("Eiffel Tower, Paris", "Eiffel Tower", 0),
        ("Paris or Lyon", "Paris", 0),
        ("A", "A", 1),
        ("", "A", 0),
        ("the", "A", 0),
        ("...", "%", 0),
        ("%", "%", 1),
    ],
)
def test_exact_match_as_squad_compares(make_sample, response, label, reward):
    assert exact_match.score([make_sample(response, label)], ExactMatchFlags(exact_match_squad=True)) == [reward]


def test_exact_match_writes_numbers_out(make_sample):
    assert exact_match([make_sample("7", 7), make_sample("0.5", 0.5), make_sample("7.0", 7)]) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (1e-7, "0.0000001"),
        (1e16, "10000000000000000"),
        (42.0, "42"),
        (-0.0, "0"),
        (1.6e-19, "0.00000000000000000016"),
        (10**20, "100000000000000000000"),
        (np.float32(0.1), "0.1"),
        (Decimal("18.90"), "18.9"),
    ],
)
@pytest.mark.parametrize("reward", ["math", "dapo", "exact_match", "last_number", "f1", "deepscaler"])
def test_a_number_as_label_is_the_shortest_plain_decimal(make_sample, reward, label, text):
    response = {"dapo": f"Answer: {text}", "math": f"\\boxed{{{text}}}", "deepscaler": f"</think>\\boxed{{{text}}}"}
    assert REWARDS[reward]([make_sample(response.get(reward, text), label)]) == [1]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_plain_decimal_is_the_number(number):
    assert float(plain_number(number)) == number and not set("eE") & set(plain_number(number))


@given(words, decimals, words)
def test_last_number_is_found_in_any_words(make_sample, before, number, after):
    plain, grouped = f"{before} {number:f} {after}", f"{before} {number:,f} {after}"
    assert find_last_number(plain) == find_last_number(grouped) == number
    assert last_number([make_sample(plain, f"{number:f}"), make_sample(plain, str(number + 1))]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 then 4.", "4"),
        ("10-4", "4"),
        ("(2)-4", "4"),
        ("x = -4", "-4"),
        ("1,234,567.5 EUR", "1234567.5"),
        ("12{,}345", "12345"),
        ("12\\,345", "12345"),
        ("1,2", "2"),
        ("12,3456", "3456"),
        ("about .25", "0.25"),
        ("6.0e2", "600"),
        ("1e99999999999", "99999999999"),
        ("#### 72", "72"),
        ("x = \N{EN DASH}4", "-4"),
        ("pages 3\N{EN DASH}4", "4"),
        ("\N{FULLWIDTH DIGIT ONE}\N{FULLWIDTH DIGIT TWO}", "12"),
        ("v2x", "2"),
        ("x = \N{MINUS SIGN}4", "-4"),
        ("10\N{MINUS SIGN}4", "4"),
        ("a loss of -$18", "-18"),
        ("-\\$1,800.50", "-1800.5"),
        ("x = - 18", "-18"),
        ("- 18 apples", "18"),
        ("10-$4", "4"),
        ("1.000.000", "1000000"),
        ("\N{ARABIC-INDIC DIGIT FOUR}\N{ARABIC-INDIC DIGIT TWO}", "42"),
    ],
)
def test_last_number_readings(text, number):
    assert find_last_number(text) == Decimal(number)


def test_no_number_in_the_response_is_wrong(make_sample):
    assert find_last_number("none") is None
    assert last_number([make_sample("none", "7"), make_sample("", "7")]) == [0.0, 0.0]


def test_labels_that_cannot_be_compared(make_sample):
    with pytest.raises(ValueError, match="prompts.jsonl:17 has no label .*--label-key"):
        exact_match([make_sample("7")])
    with pytest.raises(ValueError, match="holds no number"):
        last_number([make_sample("7", "seven")])
    for label in ({"a": 1}, True, "  "):
        with pytest.raises(ValueError, match="must be text or a number"):
            exact_match([make_sample("7", label)])


@given(st.text(max_size=9), st.text(max_size=9))
def test_shorter_is_better(make_sample, one, other):
    rewards = length([make_sample(one), make_sample(other)])
    assert (rewards[0] > rewards[1]) == (len(one) < len(other))
