"""Check the flags of an agent program: ``--agent-command`` and what it needs."""

from __future__ import annotations

import shlex

from miles.arguments.rules.debug_modes import NOTHING_IS_GENERATED
from miles.arguments.settings import Settings
from miles.flags import Errors

_OF_PROGRAMS = ("agent_timeout", "agent_concurrency")


def check_agents(settings: Settings, errors: Errors) -> None:
    """Check that a command can be read, and that its calls can be rendered and bounded."""
    rollout, command = settings.rollout, settings.rollout.agent_command
    errors.above(rollout, 0, "agent_timeout")
    errors.at_least(rollout, 1, "agent_concurrency")
    if command is None:
        errors.refuse_ignored(rollout, _OF_PROGRAMS, "without --agent-command", "add the command of a program")
        return
    if not settings.generates:
        why, what_to_do = NOTHING_IS_GENERATED, "drop that switch"
        if not rollout.debug_train_only:
            why = "by a run that generates nothing: it reads its samples, and evaluates none"
            what_to_do = "add --eval-prompt-data NAME SOURCE"
        errors.refuse_ignored(rollout, ["agent_command"], why, what_to_do)
        return
    try:
        words = shlex.split(command)
    except ValueError as error:
        errors.refuse("agent_command", command, f"cannot be split into words ({error})", "quote it as for a shell")
        return
    if not any(words[:1]):
        errors.refuse("agent_command", command, "names no program", "give a command, as python agent.py")
    if rollout.custom_generate_function_path is not None:
        rule = "generates trajectories, and so does --custom-generate-function-path"
        errors.refuse("agent_command", command, rule, "keep one of the two")
    if not settings.data.apply_chat_template:
        rule = "calls with chat messages, which are rendered by the tokenizer's chat template"
        errors.refuse("agent_command", command, rule, "add --apply-chat-template")
    if rollout.rollout_max_context_len is None:
        rule = "makes conversations that grow, and nothing bounds their prompts"
        errors.refuse("agent_command", command, rule, "add --rollout-max-context-len")
