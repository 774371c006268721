import json
from typing import ClassVar

import pytest

from miles.config.evaluation import EvaluationArguments, fill_evaluation
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.engine.base import SamplingParams
from miles.rollout.evaluate import load_eval_sets
from miles.tasks.data.settings import DataArguments


class CharacterTokenizer:
    """One token a character: what load_prompts needs of a tokenizer."""

    chat_template = None
    all_special_tokens = ()
    added_tokens_decoder: ClassVar = {}

    def __call__(self, texts, **_):
        return {"input_ids": [[ord(c) for c in text] for text in texts]}


@pytest.fixture
def held_out(tmp_path):
    path = tmp_path / "held.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": str(i)}) + "\n" for i in range(3)))
    return str(path)


def load(evaluation, **rollout):
    flags = RolloutArguments(**({"rollout_max_response_len": 20, "rollout_temperature": 0.7} | rollout))
    data = DataArguments(input_key="question", label_key="answer")
    settings = Settings(evaluation=fill_evaluation(evaluation, flags, data), data=data, rollout=flags)
    return load_eval_sets(settings, CharacterTokenizer())


def load_config(tmp_path, config, suffix="yaml"):
    path = tmp_path / f"eval.{suffix}"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return load(EvaluationArguments(eval_config=str(path), eval_top_p=0.5))


def test_no_sets(held_out):
    assert load(EvaluationArguments()) == []


def test_what_a_flag_leaves_open_is_the_rollouts(held_out):
    evaluation = EvaluationArguments(
        eval_prompt_data=("held", held_out), eval_top_p=0.9, eval_min_p=0.2, n_samples_per_eval_prompt=2
    )
    (held,) = load(evaluation, rollout_stop_token_ids=(9,), rollout_stop=("END",), rollout_max_context_len=30)
    assert (held.name, held.samples_per_prompt, held.max_context_len) == ("held", 2, 30)
    assert [p.label for p in held.prompts] == ["0", "1", "2"]
    assert held.sampling == SamplingParams(20, 0.7, 0.9, -1, (9,), ("END",), min_p=0.2)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_set_of_the_file_has_its_own_sampling(tmp_path, held_out, suffix):
    own = {"n_samples_per_eval_prompt": 4, "temperature": 0, "top_k": 5, "max_response_len": 9}
    config = [{"name": "a", "source": held_out} | own, {"name": "b", "source": held_out}]
    a, b = load_config(tmp_path, config, suffix)
    assert (a.samples_per_prompt, a.sampling) == (4, SamplingParams(9, 0, 0.5, 5))
    assert (b.samples_per_prompt, b.sampling) == (1, SamplingParams(20, 0.7, 0.5, -1))


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ({"temprature": 1}, "unknown key temprature; did you mean temperature"),
        ({"top_p": 1.5}, r"top_p 1\.5: must be in \(0, 1\]; give a number from 0 to 1"),
        ({"top_k": 0}, r"top_k 0: must be -1 \(all tokens\) or at least 1"),
        ({"top_k": True}, "top_k is True; give a value of type int"),
        ({"max_response_len": "9"}, "max_response_len is '9'; give a value of type int"),
        ({"n_samples_per_eval_prompt": 0}, "n_samples_per_eval_prompt 0: must be a finite number of at least 1"),
        ({"temperature": float("inf")}, "temperature inf: must be a finite number of at least 0"),
        ({"source": ""}, "has no source"),
        ({"n_samples_per_eval_prompt": 10**400}, "n_samples_per_eval_prompt 10+…: must be at most 2147483647"),
        ({"max_response_len": 2**31}, "max_response_len 2147483648: must be at most 2147483647"),
    ],
)
def test_faults_name_file_set_and_key(tmp_path, held_out, entry, fault):
    with pytest.raises(ValueError, match=rf"--eval-config \S+eval\.yaml, set 1: {fault}"):
        load_config(tmp_path, json.dumps([{"name": "a", "source": held_out} | entry]).replace("Infinity", ".inf"))


@pytest.mark.parametrize("config", ["{a: 1}", "[]", "", "just text"])
def test_the_file_must_hold_a_list(tmp_path, config):
    with pytest.raises(ValueError, match=r"--eval-config \S+: holds no list of sets"):
        load_config(tmp_path, config)


@pytest.mark.parametrize(("suffix", "language"), [("yaml", "YAML"), ("json", "JSON")])
def test_a_broken_file(tmp_path, suffix, language):
    with pytest.raises(ValueError, match=rf"--eval-config \S+: not valid {language}"):
        load_config(tmp_path, "[{", suffix)


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"--eval-config \S+none.yaml: cannot read the file"):
        load(EvaluationArguments(eval_config=str(tmp_path / "none.yaml")))


def test_words_that_are_not_pairs():
    with pytest.raises(ValueError, match="--eval-prompt-data a b c: 3 words are not NAME SOURCE pairs"):
        load(EvaluationArguments(eval_prompt_data=("a", "b", "c")))


def test_a_name_given_twice(held_out):
    with pytest.raises(ValueError, match="--eval-prompt-data: the set name a is given 2 times"):
        load(EvaluationArguments(eval_prompt_data=("a", held_out, "a", held_out)))


def test_a_set_may_name_its_own_columns(tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text('{"q": "1+1", "a": "2", "b": "two"}\n')
    by_flag = EvaluationArguments(eval_prompt_data=("x", str(path)), eval_input_key="q", eval_label_key="a")
    assert [(p.text, p.label) for p in load(by_flag)[0].prompts] == [("1+1", "2")]
    config = [{"name": "x", "source": str(path), "input_key": "q", "label_key": "b"}]
    assert load_config(tmp_path, config)[0].prompts[0].label == "two"
