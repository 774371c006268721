"""Rewards that run a checker on the answer, in a process with a limit: regex, json_schema and ifeval."""

import json
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.tasks.rewards.built_in import REWARDS
from miles.tasks.rewards.built_in.json_schema import JsonSchemaFlags
from miles.tasks.rewards.built_in.regex import RegexFlags
from miles.tasks.rewards.registry import get_reward_function
from miles.tasks.rewards.settings import RewardArguments

ENDLESS = r"\A(a+)+b\Z"
SCHEMA = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer", "minimum": 0}}}


def test_regex_searches_after_the_reasoning(make_sample):
    responses = ["<think>42</think> it is 42", "<think>42</think> it is 7", ""]
    assert REWARDS["regex"]([make_sample(r, r"\b42\b") for r in responses]) == [1, 0, 0]
    assert REWARDS["regex"].score([make_sample("abc")], RegexFlags(r"^a.c$")) == [1]


def test_an_endless_search_is_wrong_and_affects_no_other(make_sample):
    samples = [make_sample("a" * 60, ENDLESS), make_sample("aab", ENDLESS)]
    assert REWARDS["regex"](samples) == [0, 1]


def test_a_pattern_that_is_none_is_the_rows_fault(make_sample):
    with pytest.raises(ValueError, match=r"label '\(' of the prompt prompts.jsonl:17 is no pattern"):
        REWARDS["regex"]([make_sample("a", "(")])
    with pytest.raises(ValueError, match=r"--reward-regex \(: is no pattern"):
        get_reward_function(RewardArguments(rm_type="regex", reward_regex="("))


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ('{"age": 3}', 1),
        ('<think>{"age": -1}</think>\n{"age": 3}\n', 1),
        ('Here it is:\n```json\n{"age": 3}\n```', 1),
        ('```json\n{"age": "3"}\n```', 0),
        ('Here it is: {"age": 3}', 0),
        ('{"age": 3} {"age": 3}', 0),
        ('{"age": -1, "age": 3}', 0),  # which of the two is it?
        ('{"age": NaN}', 0),
        ("[" * 100_000, 0),
        ('{"age": ' + "9" * 10_000 + "}", 0),
        ('{"age": 3, "name": "\\ud800"}', 0),
        ("", 0),
    ],
)
def test_json_schema_accepts_one_valid_value(make_sample, response, reward):
    assert REWARDS["json_schema"]([make_sample(response, json.dumps(SCHEMA))]) == [reward]


@pytest.mark.parametrize("answer", ["1e400", "-1e400", "1" + "0" * 400, "[1e400]", "0.3"])
def test_a_number_that_no_float_holds_is_wrong_and_no_error(make_sample, answer):
    schema = {"multipleOf": 0.01, "items": {"multipleOf": 0.5}}
    assert REWARDS["json_schema"]([make_sample(answer, schema)]) == [float(answer == "0.3")]


@pytest.mark.parametrize("answer", ["NaN", "Infinity", "-Infinity", "[NaN]"])
def test_names_of_numbers_that_are_none_are_no_json(make_sample, answer):
    assert REWARDS["json_schema"]([make_sample(answer, {"type": ["number", "array"]})]) == [0]


@given(st.integers(-(10**6), 10**6), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_a_decimal_is_a_multiple_of_its_last_place_and_of_none_beyond_it(make_sample, digits, places):
    answer = f"{Decimal(digits).scaleb(-places):f}"
    for place, reward in ((places, 1), (max(places - 1, 0), int(digits % 10 == 0 or places == 0))):
        schema = (
            f'{{"multipleOf": {Decimal(1).scaleb(-place):f}, "const": {answer if "." in answer else answer + ".0"}}}'
        )
        assert REWARDS["json_schema"]([make_sample(answer, schema)]) == [reward]


def test_a_schema_comes_from_metadata_or_one_file(make_sample, tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "array"}')
    flags = JsonSchemaFlags(reward_json_schema=str(tmp_path / "schema.json"))
    assert REWARDS["json_schema"].score([make_sample("[]"), make_sample("{}")], flags) == [1, 0]
    built = REWARDS["json_schema"].build(flags)
    (tmp_path / "schema.json").unlink()  # it is read once
    assert built([make_sample("[]"), make_sample("{}")]) == [1, 0]
    assert REWARDS["json_schema"]([make_sample('"a"', metadata={"json_schema": {"const": "a"}})]) == [1]


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "nothing"}, "is not valid"),
        ({"$ref": "http://127.0.0.1:9/schema"}, "it refers to http://127.0.0.1:9/schema, which is not in it"),
        ({"$ref": "#"}, "refers to itself"),
        ("{", "not JSON"),
        (7, "of type int"),
        (None, "there is none"),
    ],
)
def test_a_faulty_schema_is_the_rows_fault_and_fetches_nothing(make_sample, schema, fault):
    with pytest.raises(ValueError, match=f"prompts.jsonl:17 is no JSON schema .*{fault}"):
        REWARDS["json_schema"]([make_sample('{"a": 1}', schema)])


def test_a_schema_that_takes_exponential_time_is_wrong(make_sample):
    assert REWARDS["json_schema"]([make_sample(f'"{"a" * 60}"', {"pattern": "^(a+)+b$"})]) == [0]


KINDS = ["punctuation:no_comma", "detectable_format:number_bullet_lists"]
ARGUMENTS = [None, {"num_bullets": 2}]


def test_ifeval_checks_every_instruction(make_sample):
    row = {"instruction_id_list": KINDS, "kwargs": ARGUMENTS}
    samples = [make_sample(r, metadata=row) for r in ("* one\n* two", "* one, two", "* one, two\n* three", "")]
    assert REWARDS["ifeval"](samples) == [1, 0, 0, 0]
    share = get_reward_function(RewardArguments(rm_type="ifeval", ifeval_share=True))
    assert share._function(samples) == [1, 0, 0.5, 0]
    said_first = [make_sample("Well, here:\n* one\n* two", metadata=row)]
    loose = get_reward_function(RewardArguments(rm_type="ifeval", ifeval_loose=True))
    assert REWARDS["ifeval"](said_first) == [0] and loose._function(said_first) == [1]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"instruction_id_list": ["no:such"], "kwargs": [{}]}, "no instruction is named no:such"),
        ({"instruction_id_list": KINDS, "kwargs": [{}]}, "must be lists of one length"),
        (
            {"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"words": 3}]},
            "lacks num_words and relation",
        ),
        ({"instruction_id_list": KINDS[:1], "kwargs": [{"words": 3}]}, "TypeError"),
        ({"instruction_id_list": KINDS[:1], "kwargs": ["{}"]}, "must hold names, and kwargs an object for each"),
        ({"instruction_id_list": [KINDS], "kwargs": [{}]}, "must hold names"),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 3, "relation": None}],
            },
            "number_words lacks relation, which the package would draw at random",
        ),
        ({}, "has no instruction_id_list in its metadata or label"),
    ],
)
def test_faulty_instructions_are_the_rows_fault(make_sample, row, fault):
    with pytest.raises(ValueError, match=f"prompts.jsonl:17.*{fault}"):
        REWARDS["ifeval"]([make_sample("some words", metadata=row)])
