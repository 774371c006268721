"""Sampling, and modes of generation that need or exclude one another."""

import re

import pytest

from miles.config.parser import parse
from miles.config.validate import validate
from tests.fast.support.rows import rows

FILTER = "--dynamic-sampling-filter-path miles.rollout.filters:check_reward_nonzero_std"
LOADS = "--load-debug-rollout-data saved_{rollout_id}.jsonl"


@pytest.mark.parametrize("flags", rows(__file__, "test_these_go_together"))
def test_these_go_together(validated, flags):
    validated(flags)


# flags given, flags left out of the smallest command, words of the only error
SAMPLING = [
    ("", "--rollout-batch-size", "--rollout-batch-size is required"),
    ("", "--rollout-max-response-len", "--rollout-max-response-len is required"),
    ("", "--num-rollout", "--num-rollout or --num-epoch is required"),
    ("--n-samples-per-prompt 0", "", "at least 1"),
    ("--rollout-temperature=-1", "", "--rollout-temperature -1.0: must be a finite number of at least 0"),
    ("--rollout-temperature nan", "", "--rollout-temperature nan"),
    ("--rollout-temperature 1e-7", "", "--rollout-temperature 1e-07: SGLang samples greedily below 1e-06"),
    ("--rollout-top-p 0", "", r"must be in \(0, 1\]"),
    ("--rollout-top-p nan", "", r"must be in \(0, 1\]"),
    ("--rollout-top-p 1.5", "", r"must be in \(0, 1\]"),
    ("--rollout-top-k 0", "", "-1 .all tokens. or at least 1"),
    ("--rollout-min-p 1.5", "", r"--rollout-min-p 1.5: must be in \[0, 1\]"),
    ("--rollout-stop-token-ids 3 -1", "", "token ids are not negative"),
    ("--thinking-max-len 0", "", "--thinking-max-len 0: must be .*at least 1"),
    ("--thinking-max-len 512 --rollout-max-response-len 512", "", "--thinking-max-len 512: leaves no room for"),
    ("--thinking-max-len 8 --thinking-min-len 9", "", "--thinking-min-len 9: is more than --thinking-max-len 8"),
    ("--thinking-max-len 8 --thinking-min-len 0", "", "--thinking-min-len 0: must be .*at least 1"),
    ("--thinking-max-len 8 --thinking-interruption stop", "", "--thinking-interruption stop: does not hold .*</think>"),
    ("--thinking-max-len 8 --custom-generate-function-path my:turns", "", "--custom-generate-function-path my:turns"),
    ("--rollout-max-context-len 1", "", "no room for a response after a prompt of one token; give 2"),
    ("--rollout-max-context-len 100 --rollout-max-prompt-len 100", "", "no room for a response"),
]
MODES = [
    (
        "--max-prompt-pass-rate 0.9 --rm-type format:1,length:0.1",
        "--rm-type",
        "--max-prompt-pass-rate 0.9: no reward of --rm-type format:1,length:0.1 states whether",
    ),
    ("--over-sampling-batch-size 4 --dynamic-sampling-filter-path a:b", "", "at least --rollout-batch-size 8"),
    ("--partial-rollout", "", "--partial-rollout: has no prompts to spare"),
    (
        "--over-sampling-early-stop --over-sampling-batch-size 8",
        "",
        "--over-sampling-early-stop: has no prompts to spare",
    ),
    (
        "--partial-rollout --over-sampling-early-stop --over-sampling-batch-size 12",
        "",
        "--over-sampling-early-stop: would drop what --partial-rollout continues",
    ),
    ("--async-steps -1", "", "--async-steps -1: must be"),
    ("--async-steps 1 --colocate", "", "--async-steps 1: generates during training, which --colocate"),
    ("--fully-async --async-steps 1 --colocate", "", "drop --colocate, or --fully-async"),
    ("--fully-async", "", "--fully-async: needs a limit on the age of samples"),
]
FILES = [
    ("--save-debug-rollout-data all.jsonl", "", "each iteration would overwrite the last"),
    ("--load-debug-rollout-data nowhere.jsonl", "", "no such file"),
    (f"{LOADS} --num-epoch 1", "--num-rollout", "needs --num-rollout"),
]


@pytest.mark.parametrize(("flags", "without", "sentence"), [*SAMPLING, *MODES, *FILES])
def test_refused_with_one_error(refused, flags, without, sentence):
    (message,) = refused(flags, without)
    assert re.search(sentence, message)


def test_fully_async_has_its_own_flow(validated):
    noted = validated("--async-steps 1 --fully-async --partial-rollout --over-sampling-batch-size 12").accepted
    assert {note.written: note.why for note in noted} == {
        "--partial-rollout": "with --fully-async",
        "--over-sampling-batch-size 12": "with --fully-async",
    }


def test_old_samples_without_a_correction_are_noted(validated):
    assert any("--async-steps 2: samples come from weights" in note for note in validated("--async-steps 2").notes)
    assert not any("--async-steps" in note for note in validated("--async-steps 2 --use-tis").notes)


@pytest.mark.parametrize(("flags", "sentence"), rows(__file__, "test_sglang_says_what_it_keeps_under_a_top_k"))
def test_sglang_says_what_it_keeps_under_a_top_k(validated, refused, flags, sentence):
    (message,) = refused(f"--rollout-engine sglang {flags}")
    assert re.search(sentence, message)
    assert validated(f"--rollout-engine sglang {flags} --no-support-replay").settings.rollout.no_support_replay
    replayed = validated("--rollout-engine sglang --rollout-top-p 0.9 --rollout-top-k 1000")
    assert replayed.settings.rollout.replays_support


def test_truncated_sampling_is_replayed_unless_that_is_switched_off(validated):
    for flags in ("--rollout-top-p 0.9", "--rollout-top-k 20", "--rollout-min-p 0.1"):
        default, biased = validated(flags), validated(f"{flags} --no-support-replay")
        assert default.settings.rollout.replays_support and not biased.settings.rollout.replays_support
        assert not any("--no-support-replay" in note for note in default.notes)
        assert any(note.startswith("--no-support-replay: the trainer's log-probs are over") for note in biased.notes)
    for flags in ("", "--rollout-top-p 1", "--rollout-temperature 0 --rollout-top-p 0.9"):
        assert not validated(flags).settings.rollout.replays_support


def test_a_served_teacher_knows_no_support(refused, validated):
    served = "--use-opd --opd-type server --opd-teacher-urls http://h:1"
    (message,) = refused(f"{served} --rollout-top-p 0.9")
    assert message.startswith("--rollout-top-p 0.9: the teacher's servers give log-probs over the whole vocabulary")
    validated(f"{served} --rollout-top-p 0.9 --no-support-replay")


def test_texts_that_end_a_response_need_an_engine_that_sees_text(validated, refused, command):
    assert validate(parse([*command(), "--rollout-stop", "\n\n"])).settings.rollout.stop_texts == ("\n\n",)
    assert validated("--rollout-stop </answer> Human:").settings.rollout.stop_texts == ("</answer>", "Human:")
    assert validated("--rollout-engine sglang --rollout-stop x").settings.rollout.stop_texts == ("x",)
    external = "--rollout-engine sglang --rollout-external --rollout-external-engine-addrs h:1"
    for flags in (external, "--partial-rollout --over-sampling-batch-size 16"):
        (message,) = refused(f"{flags} --rollout-stop x")
        assert message.startswith("--rollout-stop x") and "--rollout-stop-token-ids" in message


def test_texts_that_sglang_does_not_take(refused):
    (message,) = refused("--rollout-engine sglang --rollout-stop " + " ".join(f"text{i}" for i in range(33)))
    assert "SGLang takes at most 32 texts" in message
    (message,) = refused("--rollout-engine sglang --rollout-stop short " + "x" * 257)
    assert "SGLang takes a regular expression of at most 256 bytes, and for this text it has 257" in message
