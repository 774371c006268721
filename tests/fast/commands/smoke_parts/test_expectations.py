"""An expectation reads one number of a run's metrics and compares it."""

import math

import pytest

from miles.base.text import InputError
from miles.commands.smoke import Expectation, read_expectations

METRICS = {"eval/x/accuracy": [0.2, 0.9], "train/grad_norm": [3.0, 1.0, 2.0], "train/kl": [0.1, math.nan, 0.1]}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("eval/x/accuracy >= 0.9", None),
        ("eval/x/accuracy>0.9", "last(eval/x/accuracy) is 0.9"),
        ("first(eval/x/accuracy) <= .2", None),
        ("max( train/grad_norm ) < 3e0", "max(train/grad_norm) is 3"),
        ("mean(train/grad_norm) == 2", None),
        ("min(train/grad_norm) != 1.0", "min(train/grad_norm) is 1"),
        ("train/grad_nrm > 0", "the run logged no train/grad_nrm; near: train/grad_norm"),
        ("train/kl < 1", "train/kl is not a finite number in 1 of 3 steps"),
    ],
)
def test_bounds(text, fault):
    message = Expectation.parse(text).fault(METRICS)
    assert message == fault if fault is None else message.startswith(fault)


@pytest.mark.parametrize("text", ["eval/x", "eval/x >= high", ">= 1", "a b > 1", "eval/x => 1", "median(a) > 1", ""])
def test_other_texts_are_refused(text):
    with pytest.raises(InputError, match="--expect"):
        Expectation.parse(text)


def test_a_file_has_one_per_line(tmp_path):
    path = tmp_path / "expect.txt"
    path.write_text("# held-out\neval/x/accuracy >= 0.5  # chance is 0.1\n\ntrain/kl < 1\n")
    assert [each.text for each in read_expectations(path)] == ["eval/x/accuracy >= 0.5", "train/kl < 1"]
    path.write_text("a > 1\nb >\n")
    with pytest.raises(InputError, match="expect.txt:2: 'b >'"):
        read_expectations(path)
