"""Ranges, flags that need another one, and the arithmetic of a step."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.arguments.parser import parse
from miles.arguments.validate import validate

LOADS = "--load-debug-rollout-data saved_{rollout_id}.jsonl"
EVAL = "--eval-prompt-data held_out reasoning_gym:products --eval-interval 5"

DYNAMIC = "--dynamic-context-parallel --max-seqlen-per-dp-cp-rank 64"
# flags given, flags left out of the smallest command, what the error says
REFUSED = [
    ("", "--hf-checkpoint", "--hf-checkpoint is required"),
    ("", "--prompt-data", "--prompt-data is required"),
    ("", "--rollout-batch-size", "--rollout-batch-size is required"),
    ("", "--rollout-max-response-len", "--rollout-max-response-len is required"),
    ("", "--num-rollout", "--num-rollout or --num-epoch is required"),
    ("", "--rm-type", "--rm-type or --custom-rm-path is required"),
    ("--custom-rm-path mine:reward", "", "names a second reward"),
    ("--num-epoch 2", "", "--num-epoch 2: would be ignored beside --num-rollout 10"),
    ("--hf-checkpoint ./nowhere", "", "--hf-checkpoint ./nowhere: no such folder"),
    ("--prompt-data nowhere.jsonl", "", "--prompt-data nowhere.jsonl: no such file"),
    ("--apply-chat-template --apply-chat-template-kwargs {", "", "not JSON"),
    ("--apply-chat-template --apply-chat-template-kwargs [1]", "", "must be a JSON object"),
    ("--apply-chat-template-kwargs {}", "", "ignored without --apply-chat-template"),
    ('--train-env-vars {"A":1}', "", "environment variables are strings"),
    ("--actor-num-nodes 0", "", "at least 1"),
    ("--rollout-num-gpus 2", "", "embedded torch engine"),
    ("--n-samples-per-prompt 1", "", "every advantage is 0"),
    ("--n-samples-per-prompt 0", "", "at least 1"),
    ("--rollout-temperature=-1", "", "--rollout-temperature -1.0: must be a finite number of at least 0"),
    ("--rollout-temperature nan", "", "--rollout-temperature nan"),
    ("--rollout-top-p 0", "", "above 0"),
    ("--rollout-top-p 1.5", "", r"\[0, 1\]"),
    ("--rollout-top-k 0", "", "-1 .all tokens. or at least 1"),
    ("--rollout-stop-token-ids 3 -1", "", "token ids are not negative"),
    ("--rollout-max-context-len 64", "", "no room for a prompt"),
    ("--rollout-max-context-len 100 --rollout-max-prompt-len 100", "", "no room for a response"),
    ("--over-sampling-batch-size 4 --dynamic-sampling-filter-path a:b", "", "at least --rollout-batch-size 8"),
    ("--over-sampling-batch-size 16", "", "without --dynamic-sampling-filter-path"),
    ("--save-debug-rollout-data all.jsonl", "", "each iteration would overwrite the last"),
    ("--load-debug-rollout-data nowhere.jsonl", "", "no such file"),
    (f"{LOADS} --num-epoch 1", "--num-rollout", "needs --num-rollout"),
    (f"{LOADS} --dynamic-sampling-filter-path a:b", "", "nothing is generated"),
    ("--eps-clip 0", "", "above 0"),
    ("--eps-clip 1.5", "", r"\[0, 1\]"),
    ("--eps-clip-high=-0.1", "", "above 0"),
    ("--eps-clip-c 1", "", "above 1"),
    ("--kl-loss-coef 0.1", "", "--kl-loss-coef 0.1: would be ignored without --use-kl-loss"),
    ("--ref-load some/model", "", "ignored without --use-kl-loss"),
    ("--use-kl-loss --kl-loss-coef=-1", "", "at least 0"),
    ("--entropy-coef inf", "", "finite"),
    ("--context-parallel-size 3", "", r"--context-parallel-size 3: must divide the 8 ranks that hold different tokens"),
    ("--context-parallel-size 0", "", "at least 1"),
    ("--max-seqlen-per-dp-cp-rank 64", "", "ignored without --dynamic-context-parallel"),
    ("--dynamic-context-parallel", "", "add --max-seqlen-per-dp-cp-rank"),
    (f"{DYNAMIC} --context-parallel-size 2", "", "--context-parallel-size 2: fixes what --dynamic-context-parallel"),
    (f"{DYNAMIC} --use-dynamic-batch-size --max-tokens-per-gpu 64", "", "ignored by --dynamic-context-parallel"),
    (f"{DYNAMIC} --micro-batch-size 2", "", "--micro-batch-size 2: would be ignored by --dynamic-context-parallel"),
    ("--tis-clip 3", "", "--tis-clip 3.0: would be ignored without --use-tis"),
    ("--rs-level sequence", "", "ignored without --use-rs"),
    ("--opsm-delta 1", "", "ignored without --use-opsm"),
    ("--use-tis --tis-clip 0.5 --tis-clip-low 0.8", "", "--tis-clip-low 0.8: is above --tis-clip 0.5"),
    ("--use-rs --rs-lower-bound 3", "", "is above --rs-upper-bound 2"),
    ("--use-tis --tis-clip 0", "", "above 0"),
    ("--custom-pg-loss-reducer-function-path a:b --loss-canary always", "", "--loss-canary always: would be ignored"),
    (f"--loss-type sft_loss --use-tis {LOADS}", "--rm-type", "--use-tis: would be ignored by --loss-type sft_loss"),
    ("--log-probs-chunk-size 0", "", "-1 .all tokens. or at least 1"),
    ("--disable-rewards-normalization --disable-grpo-std-normalization", "", "with --disable-rewards-normalization"),
    ("--loss-type sft_loss", "", "--load-debug-rollout-data"),
    (f"--loss-type sft_loss {LOADS}", "", "--rm-type last_number: would be ignored by --loss-type sft_loss"),
    (f"--loss-type sft_loss --entropy-coef 1 {LOADS}", "--rm-type", "--entropy-coef 1.0: would be ignored"),
    ("--lr 0", "", "above 0"),
    ("--lr inf", "", "finite"),
    ("--min-lr 1", "", "would end above --lr"),
    ("--min-lr 1e-7 --lr-decay-style constant", "", "ignored by --lr-decay-style constant"),
    ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1", "", "sets the warm-up twice"),
    ("--lr-warmup-fraction 2", "", r"\[0, 1\]"),
    ("--adam-beta1 1", "", r"\[0, 1\)"),
    ("--weight-decay=-1", "", "at least 0"),
    ("--global-batch-size 5", "", "8 x --n-samples-per-prompt 4 = 32"),
    ("--num-steps-per-rollout 5", "", "give a divisor of 32"),
    ("--global-batch-size 8 --num-steps-per-rollout 2", "", "makes 16 rollouts, but .* = 32"),
    ("--use-dynamic-batch-size", "", "--max-tokens-per-gpu"),
    ("--max-tokens-per-gpu 100", "", "without --use-dynamic-batch-size"),
    ("--use-dynamic-batch-size --max-tokens-per-gpu 100 --micro-batch-size 2", "", "--micro-batch-size 2: would be"),
    ("--save-interval 2", "", "without --save"),
    ("--finetune", "", "--finetune: would be ignored without --load"),
    ("--no-load-optim", "", "without --load"),
    ("--no-load-rng", "", "without --load"),
    ("--eval-interval 2", "", "without an evaluation set"),
    ("--eval-top-k 2", "", "without an evaluation set"),
    ("--skip-eval-before-train", "", "without an evaluation set"),
    ("--eval-prompt-data a b", "", "--eval-interval is required"),
    ("--eval-prompt-data a b c --eval-interval 1", "", "3 words are not NAME SOURCE pairs"),
    ("--eval-prompt-data a b a c --eval-interval 1", "", "the name a stands twice"),
    ("--eval-prompt-data a b.parquet --eval-interval 1", "", "no such file"),
    ("--eval-config nowhere.yaml --eval-interval 1", "", "no such file"),
    (f"{EVAL} --eval-config sets.yaml", "", "ignored beside --eval-config"),
    (f"{EVAL} --eval-top-p 2", "", r"\[0, 1\]"),
    (f"{EVAL} {LOADS}", "--rm-type --prompt-data", "responses must be scored"),
    ("--wandb-project p", "", "without --use-wandb"),
    ("--disable-wandb-random-suffix", "", "without --use-wandb"),
    ("--no-report --report-samples 9", "", "with --no-report"),
]


@pytest.mark.parametrize(("flags", "without", "sentence"), REFUSED)
def test_refused_in_one_sentence(validated, flags, without, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        validated(flags, without)
    message = str(caught.value)
    assert re.match(r"--[a-z0-9-]+.*: .*; ", message), "flag, rule; way out"
    assert "\n" not in message


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
    ("--use-dynamic-batch-size --max-tokens-per-gpu 100 --colocate --rollout-num-gpus 2", ""),
]


@pytest.mark.parametrize(("flags", "without"), ACCEPTED)
def test_accepted_and_stable(validated, flags, without):
    once = validated(flags, without)
    assert validate(once.settings).settings == once.settings


def test_a_key_is_not_shown(validated):
    with pytest.raises(ValueError) as caught:
        validated("--wandb-key secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--rollout-temperature 0", "samples greedily"),
        ("--colocate --rollout-num-gpus 4", "no effect with --colocate"),
        ("--kl-loss-type k3", "no effect without --use-kl-loss"),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 32", "a micro-batch of its own"),
        ("", "--global-batch-size is 32"),
    ],
)
def test_worth_knowing(validated, flags, note):
    assert any(note in said for said in validated(flags).notes)


@given(
    prompts=st.integers(1, 12),
    samples=st.integers(2, 8),
    size=st.none() | st.integers(1, 100),
    steps=st.none() | st.integers(1, 20),
)
def test_step_arithmetic(prompts, samples, size, steps):
    """A rollout is exactly its steps, and what the user gave is kept; otherwise the command is refused."""
    flags = {
        "--hf-checkpoint": "m",
        "--prompt-data": "reasoning_gym:products",
        "--rm-type": "math",
        "--num-rollout": 1,
        "--rollout-max-response-len": 8,
        "--rollout-batch-size": prompts,
        "--n-samples-per-prompt": samples,
        "--global-batch-size": size,
        "--num-steps-per-rollout": steps,
    }
    settings = parse([str(word) for pair in flags.items() if pair[1] is not None for word in pair])
    collected = prompts * samples
    possible = collected % (size or 1) == 0 and collected % (steps or 1) == 0
    if not possible or (size and steps and size * steps != collected):
        with pytest.raises(ValueError, match=rf"= {collected}"):
            validate(settings)
        return
    result = validate(settings).settings
    assert result.global_batch_size * result.steps_per_iteration == collected
    assert size in (None, result.global_batch_size)
    assert steps in (None, result.steps_per_iteration)
