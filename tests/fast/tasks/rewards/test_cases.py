"""``miles check-reward`` runs cases through the real reward process, and reports failures in words and as JUnit XML."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from miles import cli
from miles.base.junit import CheckResult, write_junit
from miles.commands.check_reward import read_cases

REWARDS = """
import os, time

def exact(samples):
    return [float(s.response == s.prompt.label) for s in samples]

def hostile(samples):
    rewards = []
    for sample in samples:
        match sample.response:
            case "raise": raise KeyError("nothing there")
            case "exit": os._exit(3)
            case "hang": time.sleep(60)
            case "text": rewards.append("good")
            case _: rewards.append(0.5)
    return rewards

def first_only(samples):
    return [1.0 if s is samples[0] else 0.0 for s in samples]
"""
GOOD = [
    {"response": "4", "label": "4", "expected": 1, "name": "right"},
    {"response": "5", "label": "4", "expected": [0, 0.5], "metadata": {"a": 1}, "status": "truncated"},
]


@pytest.fixture
def check(tmp_path, monkeypatch, capfd):
    """Write cases, run the command, and return its status, output and failures by name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)

    def run(function, cases, *more):
        text = cases if isinstance(cases, str) else "\n".join(map(json.dumps, cases))
        (tmp_path / "cases.jsonl").write_text(text)
        words = ["check-reward", function, "--cases", "cases.jsonl", "--junit", "out/junit.xml", *more]
        try:
            status = cli.main(words)
        except SystemExit as end:
            return end.code, capfd.readouterr().err, {}
        suite = ElementTree.parse(tmp_path / "out" / "junit.xml").getroot()[0]
        assert suite.get("tests") == str(len(suite))
        failures = {case.get("name"): case[0].get("message") for case in suite if len(case)}
        assert suite.get("failures") == str(len(failures))
        return status, capfd.readouterr().out, failures

    return run


def test_cases_that_get_what_they_expect_pass(check):
    for function in ("my_rewards:exact", "exact_match"):
        status, output, failures = check(function, GOOD)
        assert (status, failures) == (0, {})
        assert output.startswith("3 of 3 checks passed"), "the third is all cases in one call"


def test_built_in_rewards_take_their_flags_and_weights(check):
    cases = [{"response": "abc", "label": "abc", "expected": 1.25}, {"response": "ab", "label": "abc", "expected": 0}]
    flags = ("--reward-regex", "c$", "--custom-rm-path", "my_rewards:exact")
    assert check("custom:1,regex:0.25", cases, *flags)[0] == 0
    status, output, _ = check("exact_match", cases[:1], "--repetition-ngram", "2")
    assert "--repetition-ngram 2: has no effect (read by --rm-type repetition)" in output
    assert check("repetition", cases, "--repetition-ngram", "0")[0] == 2


def test_a_wrong_reward_fails_and_names_the_case(check):
    status, output, failures = check("my_rewards:exact", [*GOOD, {"response": "x", "expected": 0.25}])
    assert status == 1
    assert failures == {"cases.jsonl:3": "the reward is 0, expected 0.25"}
    assert "FAILED  cases.jsonl:3  the reward is 0, expected 0.25\n" in output


def test_what_a_function_does_to_its_process_fails_its_case_only(check):
    cases = [{"response": word, "expected": 0.5, "name": word} for word in ("raise", "exit", "hang", "text", "fine")]
    status, _, failures = check("my_rewards:hostile", cases, "--reward-timeout", "2")
    assert status == 1 and failures.keys() == {"raise", "exit", "hang", "text"}
    assert "raised KeyError: 'nothing there'" in failures["raise"]
    assert "ended its process with exit code 3" in failures["exit"]
    assert "did not return within 2 s" in failures["hang"]
    assert "str 'good', which is not a finite number" in failures["text"]


def test_a_function_that_mixes_up_a_batch_is_found(check):
    cases = [{"response": "a", "expected": 1}, {"response": "b", "expected": 1}]
    status, _, failures = check("my_rewards:first_only", cases)
    assert status == 1
    assert failures == {"all cases in one call": "cases.jsonl:2: the reward is 0, expected 1"}


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        ("", "cases.jsonl: has no case"),
        ("{", "cases.jsonl:1: "),
        ([{"response": "a"}], "cases.jsonl:1: has no expected"),
        ([{"response": "a", "expects": 1}], "unknown key expects; did you mean expected?"),
        ([{"response": 4, "expected": 1}], "response is of type int; give text"),
        ([{"response": "a", "expected": [1, 0]}], "expected is [1, 0]; give a finite number, or two as [lowest, high"),
        ([{"response": "a", "expected": True}], "expected is true; give a finite number"),
        ([{"response": "a", "expected": float("nan")}], "expected is NaN; give a finite number"),
        ([{"response": "a", "expected": [0, float("nan")]}], "expected is [0, NaN]; give a finite number"),
        ([{"response": "a", "expected": float("inf")}], "expected is Infinity; give a finite number"),
        ([{"response": "a", "expected": [float("-inf"), 1]}], "expected is [-Infinity, 1]; give a finite number"),
        ([{"response": "a", "expected": 10**400}], f"expected is 1{'0' * 58}…; give a finite number"),
        ([{"response": "a", "expected": 1, "status": "done"}], "give one of completed, truncated, aborted"),
    ],
)
def test_a_malformed_case_is_refused_with_its_line(check, cases, message):
    status, output, _ = check("my_rewards:exact", cases)
    assert status == 2 and message in output


def test_a_function_that_is_not_there_is_refused(check):
    status, output, _ = check("my_rewards:precise", GOOD)
    assert status == 2 and "has no function precise" in output


def test_a_file_that_cannot_be_written_is_named_after_the_results(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("cases.jsonl").write_text(json.dumps({"response": "a", "label": "a", "expected": 1}))
    with pytest.raises(SystemExit, match="2"):
        cli.main(["check-reward", "exact_match", "--cases", "cases.jsonl", "--junit", "cases.jsonl/a.xml"])
    told = capsys.readouterr()
    assert told.out.startswith("1 of 1 checks passed")
    assert "--junit cases.jsonl/a.xml: cannot be written (" in told.err


def test_junit_holds_any_text(tmp_path):
    write_junit(tmp_path / "a.xml", "suite", [CheckResult("a\x00<&\ud800", 0.5, "bad\x1b[0m", "more")])
    case = ElementTree.parse(tmp_path / "a.xml").getroot()[0][0]
    assert case.get("name") == "a\ufffd<&\ufffd" and case[0].get("message") == "bad\ufffd[0m"


def test_a_case_may_hold_other_separators_of_lines(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text('{"response": "a\u2028b\u0085c", "expected": 1}\r\n\n', encoding="utf-8")
    assert [case.response for case in read_cases(path)] == ["a\u2028b\u0085c"]
