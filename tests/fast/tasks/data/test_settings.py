"""Rules of mixtures of prompt sets."""

import os

import pytest

MIX = "--prompt-mix a reasoning_gym:products b reasoning_gym:chain_sum"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--prompt-mix a", "1 word cannot be NAME SOURCE pairs"),
        ("--prompt-mix a reasoning_gym:x a reasoning_gym:y", "the name a is given twice"),
        (f"{MIX} --prompt-mix-weights 1", "1 weight cannot be one for each of 2 sets"),
        (f"{MIX} --prompt-mix-weights 1 -1", "are not all finite numbers of at least 0"),
        (f"{MIX} --prompt-mix-weights 0 0", "are all 0"),
    ],
)
def test_refused_with_one_error(refused, flags, sentence):
    (message,) = refused(flags, without="--prompt-data")
    assert sentence in message


def test_a_curriculum_needs_prompts(refused):
    assert [message.split()[0] for message in refused("--curriculum-path here:f", without="--prompt-data")] == [
        "--prompt-data"
    ]


def test_sources_by_name(validated):
    data = validated(f"{MIX} --prompt-mix-weights 0.7 0.3", without="--prompt-data").settings.data
    assert data.mixed_sources == {"a": "reasoning_gym:products", "b": "reasoning_gym:chain_sum"}
    assert data.prompt_mix_weights == (0.7, 0.3)
    assert validated().settings.data.mixed_sources == {"prompts": "reasoning_gym:products"}


def test_a_file_of_prompts_is_refused_before_the_run_if_it_has_no_rows(refused, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    mix = f"--prompt-mix a {tmp_path}/rows.jsonl b {tmp_path}/empty.jsonl"
    (message,) = refused(mix, without="--prompt-data")
    assert message == f"--prompt-mix {tmp_path}/empty.jsonl: the file is empty; give one with at least one row"


def test_a_pipe_is_no_file_of_prompts(refused, tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    (message,) = refused(f"--prompt-data {tmp_path}/rows.jsonl --label-key a", without="--prompt-data")
    assert "rows.jsonl: not a regular file; give one" in message
