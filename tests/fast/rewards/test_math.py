import logging

import pytest

from miles.rewards.built_in import math as math_module
from miles.rewards.built_in.math import REWARD as math


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"so \boxed{0.5}, not 7", r"\frac{1}{2}", 1.0),
        ("The answer is $x^2 + 2x + 1$.", "(x+1)^2", 1.0),
        ("it is 42.", 42, 1.0),
        ("it is 43.", "42", 0.0),
        ("it is \N{MINUS SIGN}42.", "-42", 1.0),
        ("it is \N{MINUS SIGN}42.", "42", 0.0),
        (r"\boxed{42}", "\N{MINUS SIGN}42", 0.0),
        ("I cannot tell.", "42", 0.0),
        ("", r"\boxed{42}", 0.0),
    ],
)
def test_equality_is_mathematical(make_sample, response, label, reward):
    assert math([make_sample(response, label)]) == [reward]


def test_unreadable_label(make_sample):
    with pytest.raises(ValueError, match="prompts.jsonl:17"):
        math([make_sample("7", "  ")])


def test_an_endless_comparison_counts_as_wrong_and_affects_no_other(make_sample, monkeypatch, caplog):
    monkeypatch.setattr(math_module, "SECONDS", 1.0)
    with caplog.at_level(logging.WARNING):
        assert math([make_sample(r"\boxed{9^{9^{9^{9}}}}", "7"), make_sample("7", "7")]) == [0.0, 1.0]
    assert "no verdict (SubprocessCallTimeout: is_equal took more than 1 s), scored 0: prompt prompts" in caplog.text
