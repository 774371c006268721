"""The rules of sections that need no others: ranges, files that must exist, flags that need another one."""

import re

import pytest

from miles.config.validate import validate

LOADS = "--load-debug-rollout-data saved_{rollout_id}.jsonl"
EVAL = "--eval-prompt-data held_out reasoning_gym:products --eval-interval 5"

# flags given, flags left out of the smallest command, words of the only error
MODEL_AND_DATA = [
    ("", "--hf-checkpoint", "--hf-checkpoint is required"),
    ("--hf-checkpoint ./nowhere", "", "--hf-checkpoint ./nowhere: no such folder"),
    ("--hf-checkpoint models/of/mine", "", "--hf-checkpoint models/of/mine: no such folder"),
    ("--hf-checkpoint pyproject.toml", "", "--hf-checkpoint pyproject.toml: is a file; give the folder"),
    ("", "--prompt-data", "--prompt-data is required"),
    ("--lr -1e-5", "", r"--lr -1e-05: must be in \(0, 1\]; give a number from 0 to 1"),
    ("--prompt-data nowhere.json --label-key a", "", "--prompt-data nowhere.json: not a prompt source"),
    ("--prompt-data some/where/else --label-key a", "", "not a prompt source; give FILE.jsonl, FILE.parquet, hf:NAME"),
    ("--prompt-data owner/prompts --label-key a", "", "--prompt-data owner/prompts: no such folder; give hf:owner"),
    ("--prompt-data pyproject.toml --label-key a", "", "--prompt-data pyproject.toml: not a prompt source"),
    ("--prompt-data hf: --label-key a", "", "--prompt-data hf:: names nothing; give"),
    ("--eval-prompt-data held out.csv --eval-interval 5", "", "--eval-prompt-data out.csv: not a prompt source"),
    ("--output-dir pyproject.toml", "", "--output-dir pyproject.toml: is a file; give a folder"),
    ("--save pyproject.toml", "", "--save pyproject.toml: is a file; give a folder"),
    ("--load pyproject.toml", "", "--load pyproject.toml: is a file; give a folder"),
    ("--apply-chat-template --apply-chat-template-kwargs {", "", "not JSON"),
    ("--apply-chat-template --apply-chat-template-kwargs [1]", "", "must be a JSON object"),
]
MINE = "--custom-rm-path mine:reward"
REWARD = [
    ("", "--rm-type", "--rm-type or --custom-rm-path is required"),
    (f"{MINE} --reward-timeout=-1", "--rm-type", "--reward-timeout -1.0: must be a finite number of at least 0"),
    (f"{MINE} --reward-memory=-1", "--rm-type", "--reward-memory -1.0: must be a finite number of at least 0"),
    ("--reward-error value", "", "--reward-error value: needs the value; add --reward-error-value"),
    ("--reward-error skip", "", "--reward-error skip: no such choice"),
    (f"{EVAL} {LOADS}", "--rm-type --prompt-data", "responses must be scored"),
]
OPTIMIZER = [
    ("--lr 0", "", r"\(0, 1\]"),
    ("--lr 1e5", "", r"\(0, 1\]"),
    ("--min-lr 1", "", "would end above --lr"),
    ("--lr-warmup-fraction 2", "", r"\[0, 1\]"),
    ("--lr-warmup-iters 20 --lr-decay-iters 10", "", "--lr-warmup-iters 20: must be less than --lr-decay-iters 10"),
    ("--lr-warmup-iters 10 --lr-decay-iters 10", "", "--lr-warmup-iters 10: must be less than --lr-decay-iters 10"),
    ("--lr-warmup-fraction 1", "", "--lr-warmup-fraction 1: leaves no step to the decay"),
    ("--lr-warmup-fraction 1 --lr-decay-iters 10", "", "--lr-warmup-fraction 1: leaves no step to the decay"),
    ("--lr-warmup-fraction 0.96 --lr-decay-iters 10", "", "0.96: is 10 steps, and must be less than"),
    ("--adam-beta1 1", "", r"\[0, 1\)"),
    ("--weight-decay=-1", "", "at least 0"),
]
CHECKPOINT = [
    ("--save x --save-keep-last 0", "", "--save-keep-last 0: must be"),
    ("--save x --save-best rollout/reward:most", "", "--save-best rollout/reward:most: 'most' is neither max nor min"),
    ("--save x --save-best reward", "", "--save-best reward: is no metric of metrics.jsonl"),
    ("--save x --save-best eval/a/accuracy", "", "--save-best eval/a/accuracy: needs an evaluation set"),
]
EVALUATION = [
    ("--eval-prompt-data a b c --eval-interval 1", "", "3 words cannot be NAME SOURCE pairs"),
    ("--eval-prompt-data a hf:b a hf:c --eval-interval 1", "", "the name a is given twice"),
    ("--eval-config nowhere.yaml --eval-interval 1", "", "no such file"),
    (f"{EVAL} --eval-top-p 2", "", r"\(0, 1\]"),
]


@pytest.mark.parametrize(
    ("flags", "without", "sentence"),
    [*MODEL_AND_DATA, *REWARD, *OPTIMIZER, *CHECKPOINT, *EVALUATION],
)
def test_refused_with_one_error(refused, flags, without, sentence):
    (message,) = refused(flags, without)
    assert re.search(sentence, message)


def test_two_kinds_of_evaluation_sets(validated, tmp_path):
    (tmp_path / "sets.yaml").write_text("")
    (note,) = validated(f"{EVAL} --eval-config {tmp_path}/sets.yaml").accepted
    assert (note.written, note.why) == ("--eval-prompt-data held_out reasoning_gym:products", "with --eval-config")


ACCEPTED = [
    ("", ""),
    ("--num-epoch 2", "--num-rollout"),
    ("--n-samples-per-prompt 1 --disable-rewards-normalization", ""),
    (LOADS, "--prompt-data --rm-type"),
    (f"{LOADS} --loss-type sft_loss --n-samples-per-prompt 1", "--prompt-data --rm-type"),
    (f"{LOADS} --loss-type sft_loss {EVAL}", ""),
    (f"{EVAL} --eval-temperature 0 --n-samples-per-eval-prompt 4", ""),
    ("--use-kl-loss --ref-load some/model --kl-loss-type low_var_kl", ""),
    ("--custom-rm-path mine:reward", "--rm-type"),
    ("--over-sampling-batch-size 16 --dynamic-sampling-filter-path a:b", ""),
    ("--lr-decay-style constant --lr-warmup-fraction 0.1 --lr-decay-iters 100", ""),
    ("--save-debug-rollout-data one.jsonl --num-rollout 1", ""),
    ('--train-env-vars {"A":"1"} --apply-chat-template --apply-chat-template-kwargs {"a":false}', ""),
    ("--use-dynamic-batch-size --max-tokens-per-gpu 100 --colocate", ""),
]


@pytest.mark.parametrize(("flags", "without"), ACCEPTED)
def test_accepted_and_stable(validated, flags, without):
    once = validated(flags, without)
    assert validate(once.settings).settings == once.settings


@pytest.mark.parametrize(
    "flags",
    [
        '--train-env-vars {"HF_TOKEN":"sesame","A":1}',
        '--train-env-vars {"PIN":123sesame}',
        '--train-env-vars ["sesame"]',
        '--train-env-vars {"N":7,"B":"sesame"}',
        "--rollout-engine sglang --actor-num-gpus-per-node 2 --sglang-api-key sesame\u00e9",
        "--hf-checkpoint ./https://me:sesame@host",
    ],
)
def test_a_secret_is_not_shown(refused, flags):
    (message,) = refused(flags)
    assert message.startswith("--") and "sesame" not in message


@pytest.mark.parametrize("flag", ["--ref-load", "--opd-teacher-load"])
def test_an_empty_folder_is_neither_a_model_nor_a_checkpoint(refused, tmp_path, flag):
    needed = "--use-kl-loss" if flag == "--ref-load" else "--use-opd"
    (message,) = refused(f"{needed} {flag} {tmp_path}")
    assert message.startswith(f"{flag} {tmp_path}: the folder is empty; give the folder of a model")
