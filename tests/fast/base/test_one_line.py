"""Text of others in messages is short and has no control characters."""

import doctest

import pytest

from miles.base import text as one_line
from miles.base.text import few_lines, name_and_words


class Silent(BaseException):
    def __str__(self):
        raise SystemExit(3)


def test_the_examples_are_right():
    assert doctest.testmod(one_line).failed == 0


@pytest.mark.parametrize("text", ["x" * 10**7, "\n" * 10**7, "\x1b[2J" * 10**6, "\u202e\r\x07"])
def test_any_text_becomes_few_lines_without_control_characters(text):
    excerpt = few_lines(text, lines=10, limit=80)
    assert len(excerpt) <= 11 * 81
    assert all(line.isprintable() for line in excerpt.split("\n"))


def test_a_long_line_stays_one():
    assert few_lines("x" * 10**7, limit=5) == "xxxx…"


def test_the_ends_of_a_long_text_are_kept():
    excerpt = few_lines("first\n" + "x\n" * 10**7 + "last", lines=4).splitlines()
    assert excerpt[0] == "first" and excerpt[-1] == "last" and len(excerpt) == 5


def test_an_error_without_words_is_named():
    assert name_and_words(Silent()) == "Silent: (its str raises SystemExit)"
