"""Every built-in reward judges whatever a model writes within 2 seconds of a core, or counts it as wrong."""

import importlib
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from miles.tasks.rewards.built_in import REWARDS
from miles.tasks.rewards.subprocess_call import MAX_CHILDREN

SECONDS = 2.0
LIMITED = ("ifeval", "json_schema", "math", "reasoning_gym", "regex")
SLACK = 10.0  # for a busy machine; without limits these answers take from 10 s to hours

TOWER = "9^{9^{9^{9}}}"
ANSWERS = {
    "tower": rf"\boxed{{{TOWER}}}",
    "tower in python": "9**9**9**9",
    "tower in words": "The answer is 9^9^9.",
    "tower of a fraction": rf"\boxed{{(1/3)^{{{TOWER}}}}}",
    "factorial": r"\boxed{99999999!!!}",
    "nested fractions": r"\boxed{" + r"\frac{1}{" * 3000 + "2" + "}" * 3001,
    "nested roots": r"\boxed{" + r"\sqrt{" * 3000 + "2" + "}" * 3001,
    "nested brackets": "(" * 10_000 + "1" + ")" * 10_000,
    "a megabyte of open braces": r"\boxed" + "{" * 1_000_000,
    "a megabyte of braces": r"\boxed{" + "{}" * 500_000 + "}",
    "a megabyte of boxes": r"\boxed{" * 140_000,
    "a megabyte of dollars": "$" * 1_000_000,
    "a megabyte of digits": "1" * 1_000_000,
    "a megabyte of grouped digits": "1,111" + ",111" * 250_000 + "1",
    "a megabyte of points": "1." * 500_000,
    "a megabyte of minus signs": "-" * 1_000_000 + "1",
    "a huge exponent": "1e999999999",
    "a long sum": r"\boxed{" + "+".join(f"x_{{{i}}}" for i in range(20_000)) + "}",
    "a huge product": r"\boxed{" + "".join(f"(x+{i})" for i in range(3000)) + "}",
    "an integral": r"\boxed{\int_0^1 e^{x^{x^{x^x}}} \sin(x^{100}) dx}",
    "a large matrix": r"\boxed{\begin{pmatrix}" + r"1 & 2 \\ " * 20_000 + r"\end{pmatrix}}",
    "open tags": "<answer>" * 100_000,
    "python that ends its process": "<answer>__import__('os')._exit(0)</answer>",
    "python without end": "<answer>" + "[" * 100_000 + "</answer>",
    "a zero byte and control sequences": "\x00\x1b[2J\x07" * 1000,
    "half of a surrogate pair": "\ud800",
    "nothing": "",
}


PROMPTS = {  # the label and data of a row, if not the label 42
    "gpqa": {"label": "A"},
    "ifeval": {
        "metadata": {
            "instruction_id_list": ["startend:end_checker", "language:response_language"],
            "kwargs": [{"end_phrase": "that is 42"}, {"language": "en"}],
        }
    },
    "json_schema": {"label": {"type": "integer", "const": 42}},
    "python_code": {"metadata": {"inputs": [""], "outputs": ["42"]}},
    "regex": {"label": r"\A(\W|\d+)*42\Z"},
}
PENALTIES = ("length", "overlong", "repetition")
ASKS_SERVERS = ("judge", "remote_rm")  # test_http_rewards.py
READS_NO_ANSWER = ("environment",)


def samples_of(name, make_sample, response):
    if name != "reasoning_gym":
        sample = make_sample(response, **{"label": "42", **PROMPTS.get(name, {})})
        if name in PENALTIES:  # they read tokens, and a response has no more than this
            sample.response_ids = sample.response_ids[:10_000]
        return [sample]
    import reasoning_gym as gym  # slow to import, which every worker of pytest-xdist would do

    samples = []
    for task in ("gcd", "countdown", "simple_equations"):
        options = {"size": 1, "seed": 1}
        entry = gym.create_dataset(task, **options)[0]
        origin = {"reasoning_gym": {"task": task, "options": options, "entry": entry}}
        samples.append(make_sample(response, metadata=origin))
    return samples


JUDGED = [name for name in REWARDS if name not in ASKS_SERVERS + READS_NO_ANSWER]


@pytest.fixture(params=JUDGED)
def reward(request, make_sample, section_of):
    """Return name and function of a built-in reward whose processes, if it has any, are started."""
    function = partial(REWARDS[request.param].score, flags=section_of(request.param))
    with ThreadPoolExecutor(MAX_CHILDREN) as threads:
        warm_up = samples_of(request.param, make_sample, "7")
        list(threads.map(function, [warm_up] * MAX_CHILDREN))
    return request.param, function


def is_wrong(name, value):
    return value < 1.0 if name not in PENALTIES else value <= 0.0


def timed(function, samples):
    started = time.monotonic()
    values = function(samples)
    return values, time.monotonic() - started


def test_the_limits_are_within_two_seconds():
    limits = [importlib.import_module(f"miles.tasks.rewards.built_in.{name}").SECONDS for name in LIMITED]
    assert all(0 < limit <= SECONDS for limit in limits)


@pytest.mark.slow  # most answers take the whole of the limit
@pytest.mark.timeout(900)
def test_a_hostile_answer_is_judged_in_time_or_wrong(reward, make_sample):
    name, function = reward
    for kind, answer in ANSWERS.items():
        for sample in samples_of(name, make_sample, answer):
            (value,), seconds = timed(function, [sample])
            assert is_wrong(name, value), kind
            assert seconds < SECONDS + SLACK, kind


@pytest.mark.timeout(900)
@pytest.mark.parametrize("reward", [name for name in JUDGED if name != "ifeval"], indirect=True)  # seconds of imports
@pytest.mark.parametrize(
    "kind", ["tower", "open tags", pytest.param("a megabyte of open braces", marks=pytest.mark.slow)]
)
def test_four_hostile_answers_at_a_time(reward, make_sample, kind):
    name, function = reward
    samples = (samples_of(name, make_sample, ANSWERS[kind]) * MAX_CHILDREN)[:MAX_CHILDREN]
    with ThreadPoolExecutor(MAX_CHILDREN) as threads:
        judged = list(threads.map(lambda sample: timed(function, [sample]), samples))
    assert all(is_wrong(name, value) for (value,), _ in judged)
    assert max(seconds for _, seconds in judged) < MAX_CHILDREN * (SECONDS + SLACK)  # on one core, after each other


def test_a_right_answer_among_hostile_ones_is_right(make_sample):
    function = REWARDS["math"]
    hostile = [make_sample(ANSWERS["tower"], "42")] * 3
    assert function([*hostile, make_sample(r"\boxed{42}", "42"), *hostile]) == [0.0] * 3 + [1.0] + [0.0] * 3
