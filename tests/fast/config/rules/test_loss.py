"""Ranges of the loss section, and flags that the chosen loss does not read."""

import re

import pytest

LOADS = "--load-debug-rollout-data saved_{rollout_id}.jsonl"

# flags given, flags left out of the smallest command, words of an error
REFUSED = [
    ("--eps-clip 0", "", r"must be in \(0, 1\]"),
    ("--eps-clip 1.5", "", r"must be in \(0, 1\]"),
    ("--eps-clip-high=-0.1", "", "above 0"),
    ("--eps-clip-c 1", "", "above 1"),
    ("--use-kl-loss --kl-loss-coef=-1", "", "at least 0"),
    ("--entropy-coef inf", "", "finite"),
    ("--use-tis --tis-clip 0.5 --tis-clip-low 0.8", "", "--tis-clip-low 0.8: is above --tis-clip 0.5"),
    ("--use-rs --rs-lower-bound 3", "", "is above --rs-upper-bound 2"),
    ("--use-tis --tis-clip 0", "", "above 0"),
    ("--use-rs --rs-veto-threshold 0", "", "--rs-veto-threshold 0.0: must be a finite number above 0"),
    ("--use-rollout-logprobs --use-tis", "", "--use-tis: compares the trainer's .* with --use-rollout-logprobs p_old"),
    ("--use-rollout-logprobs --use-rs", "", "--use-rs: compares the trainer's .*; drop one of the two"),
    (
        "--use-rollout-logprobs --advantage-estimator optimal_token_baseline",
        "",
        "--use-rollout-logprobs: --advantage-estimator optimal_token_baseline reads the trainer's probabilities",
    ),
    (
        "--use-rollout-logprobs --rollout-top-p 0.9 --no-support-replay",
        "",
        "--use-rollout-logprobs: with --no-support-replay the engine's log-probs are over the tokens that were kept",
    ),
    (f"--loss-type sft_loss --use-tis {LOADS}", "--rm-type", "--use-tis: is no part of --loss-type sft_loss"),
    (
        "--advantage-estimator optimal_token_baseline --filter-zero-reward-samples",
        "",
        "--filter-zero-reward-samples: removes samples .* optimal_token_baseline compares the samples of a group on",
    ),
    (
        "--advantage-estimator optimal_token_baseline --rollout-sample-filter-path a:b",
        "",
        "--rollout-sample-filter-path a:b: removes samples .* optimal_token_baseline compares",
    ),
    (
        "--loss-type custom_loss --custom-loss-function-path a:b --entropy-target 0.2",
        "",
        "--entropy-target 0.2: is no part of --loss-type custom_loss; compute it in your function",
    ),
    (
        "--loss-type custom_loss --custom-loss-function-path a:b --use-kl-loss --kl-loss-coef 0.1 --kl-target 0.2",
        "",
        "--kl-target 0.2: adapts --kl-loss-coef, which --loss-type custom_loss leaves to your function",
    ),
    ("--log-probs-chunk-size 0", "", "-1 .all tokens. or at least 1"),
    (
        "--advantage-estimator gdpo --rm-type math:1,format:1 --reward-error value --reward-error-value 0",
        "--rm-type",
        "--reward-error value: .* reads each reward of --rm-type math:1,format:1 on its own; use --reward-error drop",
    ),
    (
        f"--loss-type sft_loss --rollout-temperature 0.7 {LOADS}",
        "--rm-type",
        "--rollout-temperature 0.7: would divide the logits .*; give 1; evaluation has --eval-temperature",
    ),
    (f"--loss-type sft_loss --entropy-coef 1 {LOADS}", "--rm-type", "--entropy-coef 1.0: is no part of"),
]


@pytest.mark.parametrize(("flags", "without", "sentence"), REFUSED)
def test_refused(refused, flags, without, sentence):
    assert any(re.search(sentence, message) for message in refused(flags, without))


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "maxrl"])
def test_one_answer_per_prompt_is_refused_where_answers_are_compared(refused, validated, estimator):
    flags, without = f"--advantage-estimator {estimator}", "--n-samples-per-prompt"
    (message,) = refused(flags, without)
    assert message.startswith("--n-samples-per-prompt 1: ") and "every advantage is 0 and nothing is learned" in message
    validated(f"{flags} --debug-rollout-only", without)
    validated(f"{flags} --custom-reward-post-process-path mine:advantages", without)
    validated("--advantage-estimator grpo --disable-rewards-normalization", without)
    validated("--loss-type sft_loss", f"{without} --rm-type --rollout-max-response-len")
