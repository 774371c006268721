"""Check the flags of what makes trajectories by calls of the model: an agent program, or an environment."""

from __future__ import annotations

import shlex

from miles.base.flags import Errors, flag_name
from miles.config.settings import Settings
from miles.tasks.environments.chosen import read_choice
from miles.tasks.rewards.settings import ENVIRONMENT


def check_agents(settings: Settings, errors: Errors) -> None:
    """Check that program or environment can be read, and that the calls can be rendered and bounded."""
    rollout = settings.rollout
    with errors.catching():
        if rollout.environment is None and ENVIRONMENT in settings.reward.weights:
            what_to_do = "add --environment, or name another reward"
            errors.refuse("rm_type", settings.reward.rm_type, "reads the reward of an environment", what_to_do)
    if rollout.agent_command is not None:
        _check_maker(settings, "agent_command", errors)
    if rollout.environment is not None:
        with errors.catching():
            _check_kind(settings, rollout.environment, errors)
        _check_maker(settings, "environment", errors)
        if rollout.agent_command is not None:
            rule = "generates trajectories, and so does --agent-command"
            errors.refuse("environment", rollout.environment, rule, "keep one of the two")


def _check_kind(settings: Settings, name: str, errors: Errors) -> None:
    """Check the data that a built-in environment gives and reads.

    Raises:
        InputError: There is no such environment.
    """
    choice = read_choice(name)
    if choice is None:
        return
    kind, _ = choice
    if not kind.has_reward and ENVIRONMENT in settings.reward.weights:
        rule = f"reads the reward of an environment, and {kind.name} gives none"
        errors.refuse(
            "rm_type", settings.reward.rm_type, rule, "name another reward, such as math, or --custom-rm-path"
        )


def _check_maker(settings: Settings, name: str, errors: Errors) -> None:
    """Check what makes the trajectories, the flag ``name``, alongside the other flags."""
    rollout = settings.rollout
    value = str(getattr(rollout, name))
    if name == "agent_command" and not _names_program(value, errors):
        return
    if rollout.custom_generate_function_path is not None:
        rule = "generates trajectories, and so does --custom-generate-function-path"
        errors.refuse(name, value, rule, "keep one of the two")
    if not settings.data.apply_chat_template:
        rule = "calls with chat messages, which are rendered by the tokenizer's chat template"
        errors.refuse(name, value, rule, f"add {flag_name('apply_chat_template')}")
    if rollout.rollout_max_context_len is None:
        rule = "makes conversations that grow, and nothing bounds their prompts"
        errors.refuse(name, value, rule, f"add {flag_name('rollout_max_context_len')}")


def _names_program(command: str, errors: Errors) -> bool:
    """Return whether the command can be split into words; report it if not, and if it is empty."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        errors.refuse("agent_command", command, f"cannot be split into words ({error})", "quote it as for a shell")
        return False
    if not any(words[:1]):
        errors.refuse("agent_command", command, "names no program", "give a command, as python agent.py")
    return True
