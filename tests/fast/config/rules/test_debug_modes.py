"""Runs that only generate or only train, and runs on conversations."""

import pytest

from miles.commands.rehearsal.trace import response_length
from miles.config.explain import explain

SAVED = "--load-debug-rollout-data saved_{iteration}.jsonl"
EVALUATED = "--eval-prompt-data held reasoning_gym:products --eval-interval 2"
CONVERSATIONS = "--loss-type sft_loss --n-samples-per-prompt 1"


def test_a_run_without_a_trainer(validated):
    settings = validated(f"--debug-rollout-only {EVALUATED}").settings
    assert settings.generates and not settings.trains
    assert "1 rollout actor with the torch engine, no trainer" in explain(validated("--debug-rollout-only"))


def test_a_run_without_an_engine(validated):
    assert validated(f"{SAVED} {EVALUATED}").settings.generates
    settings = validated(f"--debug-train-only {SAVED}").settings
    assert settings.trains and not settings.generates


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--debug-train-only", "needs samples to train on"),
        (f"--debug-rollout-only {SAVED}", "would generate nothing"),
        ("--debug-rollout-only --colocate", "no trainer to share devices with"),
        (f"--debug-rollout-only --debug-train-only {SAVED}", "contradicts --debug-rollout-only"),
        (f"--debug-rollout-only {CONVERSATIONS}", "would generate nothing"),
    ],
)
def test_flags_of_the_half_that_does_not_run_are_refused(refused, flags, expected):
    (message,) = refused(flags, without="--rm-type --n-samples-per-prompt" if CONVERSATIONS in flags else "")
    assert expected in message


def test_conversations_are_trained_on_as_they_are(validated):
    without = "--rm-type --rollout-max-response-len --n-samples-per-prompt"
    settings = validated(CONVERSATIONS, without).settings
    assert settings.reads_conversations and not settings.generates
    assert "8 conversations, each of them one trajectory" in explain(validated(CONVERSATIONS, without))
    assert settings.data.sft_roles == ("assistant",)
    rehearsed = f'{CONVERSATIONS} --rehearse --rehearse-response-len 9 --apply-chat-template-kwargs {{"a":1}}'
    assert response_length(validated(rehearsed, without).settings) == 9
    assert validated(f"{CONVERSATIONS} --sft-roles assistant tool", without).settings.data.sft_roles[1] == "tool"


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ("--loss-type sft_loss", "--n-samples-per-prompt"),
        (f"{CONVERSATIONS} --loss-agg-mode seq-mean-token-sum-norm", "--rollout-max-response-len"),
        (f"{CONVERSATIONS} {EVALUATED} --rm-type length", "--rollout-max-response-len"),
        (f'{CONVERSATIONS} {EVALUATED} --rm-type length --apply-chat-template-kwargs {{"a":1}}', "--apply-chat-t"),
        (f"{CONVERSATIONS} --rehearse", "--rehearse-response-len is required"),
    ],
)
def test_conversations_are_not_generated(refused, flags, flag):
    without = "--rm-type --rollout-max-response-len" + " --n-samples-per-prompt" * (CONVERSATIONS in flags)
    assert any(message.startswith(flag) for message in refused(flags, without))


def test_a_dynamic_step_has_all_trajectories_of_an_iteration(validated, refused):
    assert validated("--global-batch-size 8").settings.steps_per_iteration == 4
    settings = validated("--use-dynamic-global-batch-size --num-steps-per-rollout 1").settings
    assert (settings.global_batch_size, settings.steps_per_iteration) == (32, 1)
    (message,) = refused("--use-dynamic-global-batch-size --num-steps-per-rollout 2")
    assert message.startswith("--num-steps-per-rollout 2")
