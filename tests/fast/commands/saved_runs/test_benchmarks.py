"""``miles eval --benchmarks``: small sets with the columns of the public ones, in folders, stand in for the hub."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import datasets
import pytest

from miles.base.text import InputError
from miles.base.tokenizer import load_tokenizer
from miles.commands import eval as eval_command
from miles.commands.eval import BENCHMARKS, benchmark_settings
from miles.commands.saved_runs.generation import settings_for
from miles.rollout.evaluate import load_eval_sets
from miles.tasks.rewards.registry import get_reward_function
from miles.types.sample import Sample

SETS = {
    "gsm8k": {"question": ["1 + 1?", "2 + 2?"], "answer": ["1 + 1 = 2\n#### 2", "#### 4"]},
    "math500": {"problem": ["x"], "answer": ["\\frac{1}{2}"], "level": [3]},
    "aime24": {"problem": ["y"], "answer": ["204"]},
    "ifeval": {
        "prompt": ["No commas.", "Two bullets."],
        "instruction_id_list": [["punctuation:no_comma"], ["detectable_format:number_bullet_lists"]],
        "kwargs": [[{"num_bullets": None}], [{"num_bullets": 2}]],
    },
}
ANSWERS = {"gsm8k": "so 4", "math500": "\\boxed{0.5}", "aime24": "it is 204", "ifeval": "* a, b\n* c"}
REWARDS = {"gsm8k": [0.0, 1.0], "math500": [1.0], "aime24": [1.0], "ifeval": [0.0, 1.0]}


@pytest.fixture
def words(tmp_path):
    for name, columns in SETS.items():
        split = datasets.Dataset.from_dict(columns)
        datasets.DatasetDict({BENCHMARKS[name].split: split}).save_to_disk(tmp_path / name)
    return [f"{name}={tmp_path / name}" for name in SETS]


def test_each_is_asked_and_scored_as_its_table_says(run, words, tiny_model, tmp_path):
    here = settings_for(run.settings, Path(tiny_model), tmp_path, None)
    assert {*SETS} == {*BENCHMARKS}
    for each in benchmark_settings(here, words, tmp_path, 8):
        (suite,) = load_eval_sets(each, load_tokenizer(str(tiny_model)))
        expected = (16, 0.6, 8) if suite.name == "aime24" else (1, 0.0, 8)
        assert (suite.samples_per_prompt, suite.sampling.temperature, suite.sampling.max_new_tokens) == expected
        assert all("put your final answer within \\boxed{}" in p.text for p in suite.prompts if "math" in suite.name)
        samples = [Sample(prompt, i, i, response=ANSWERS[suite.name]) for i, prompt in enumerate(suite.prompts)]
        assert list(asyncio.run(get_reward_function(each.reward)(samples))) == REWARDS[suite.name], suite.name


def test_the_command_prints_a_table_per_benchmark(run, words, tiny_model, capsys):
    command = [str(run.folder), "--weights", str(tiny_model), "--json", "--max-response-len", "4", "--n-samples", "2"]
    assert eval_command.main([*command, "--benchmarks", words[0]]) == 0
    result = json.loads(capsys.readouterr().out)["gsm8k"]
    assert (result["prompts"], result["samples_per_prompt"]) == (2, 2) and "pass@2" in result["estimates"]


def test_what_is_no_benchmark_is_told_before_anything_is_read(tmp_path, capsys):
    with pytest.raises(SystemExit):
        eval_command.main([str(tmp_path), "--benchmarks", "gsm8k", "gsm"])
    message = "--benchmarks gsm: no such benchmark; give some of aime24, gsm8k, ifeval, math500\n"
    assert capsys.readouterr().err.endswith(message)


def test_a_set_of_another_kind_is_told(run, tiny_model, tmp_path, words):
    here = settings_for(run.settings, Path(tiny_model), tmp_path, None)
    for word, message in (
        (
            f"gsm8k={tmp_path / 'ifeval'}",
            f"--benchmarks gsm8k: prompt source hf:{tmp_path}/ifeval:test: no split test; it has train",
        ),
        (f"math500={tmp_path / 'gsm8k'}", "--benchmarks math500: the set has no column 'problem'; it has question"),
    ):
        with pytest.raises(InputError) as told:
            list(benchmark_settings(here, [word], tmp_path, None))
        assert str(told.value).startswith(message), str(told.value)
