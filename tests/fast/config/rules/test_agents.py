"""The flags of an agent program and of an environment, and what they need."""

import pytest

from miles.base.flags import FlagError
from miles.config.explain import explain
from miles.config.parser import parse
from miles.config.validate import validate

NEEDED = ("--apply-chat-template", "--rollout-max-context-len", "4096")
SAVED = ("--load-debug-rollout-data", "saved_{iteration}.jsonl")
EVALUATED = ("--eval-prompt-data", "held", "reasoning_gym:products", "--eval-interval", "2")


def read(command, agent, *flags):
    return validate(parse([*command(), *(["--agent-command", agent] if agent else []), *flags]))


def test_a_program_is_named_with_what_it_needs(command):
    result = read(command, "python agent.py --fast", *NEEDED, "--agent-timeout", "5")
    rollout = result.settings.rollout
    assert (rollout.agent_command, rollout.agent_concurrency) == ("python agent.py --fast", 16)
    assert "each by a run of python agent.py --fast" in explain(result)


def test_an_environment_is_named_with_what_it_needs(command):
    result = read(command, "", *NEEDED, "--environment", "reasoning_gym:attempts=2", "--agent-timeout", "5")
    assert "each in the environment reasoning_gym:attempts=2" in explain(result)


def test_an_environment_may_have_rows_without_labels(command):
    result = read(command, "", *NEEDED, "--environment", "games:Chess", "--rm-type", "environment:1,length:-0.1")
    assert result.settings.reward.labels_optional


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--environment", "a.b:C", "--agent-command", "agent"], "--environment a.b:C: .* keep one of the two"),
        (["--environment", "a:C", "--custom-generate-function-path", "a:b"], "--environment a:C: .* keep one of the"),
        (["--environment", "reasoning"], "--environment reasoning: no such environment; did you mean reasoning_gym"),
        (["--environment", "verifiers:size=2"], "verifiers has no option size; it has none"),
        (["--rm-type", "environment"], "--rm-type environment: reads the reward of an environment; add --environment"),
    ],
)
def test_an_environment_does_not_go_with_these(command, flags, fault):
    with pytest.raises(FlagError, match=fault):
        read(command, "", *NEEDED, *flags)


@pytest.mark.parametrize(("without", "fault"), [(0, "add --apply-chat-template"), (1, "add --rollout-max-context-len")])
def test_an_environment_needs_messages_and_a_limit(command, without, fault):
    flags = [*NEEDED[1:]] if without == 0 else [*NEEDED[:1]]
    with pytest.raises(FlagError, match=fault):
        read(command, "", *flags, "--environment", "a:C")


def test_a_program_may_evaluate_a_run_that_reads_its_samples(command):
    assert read(command, "agent", *NEEDED, *SAVED, *EVALUATED).settings.generates


@pytest.mark.parametrize(
    ("agent", "flags", "fault"),
    [
        ("agent", [*NEEDED, "--agent-timeout", "0"], "--agent-timeout 0.0: must be a finite number above 0"),
        ("agent", [*NEEDED, "--agent-concurrency", "0"], "--agent-concurrency 0: .* at least 1"),
        ("'agent", NEEDED, "--agent-command 'agent: cannot be split into words"),
        ("#", [*NEEDED, "--custom-generate-function-path", "a:b"], "keep one of the two"),
        ("''", NEEDED, "names no program"),
        ("agent", NEEDED[1:], "add --apply-chat-template"),
        ("agent", NEEDED[:1], "add --rollout-max-context-len"),
    ],
)
def test_what_does_not_go_together_is_refused(command, agent, flags, fault):
    with pytest.raises(FlagError, match=fault):
        read(command, agent, *flags)
