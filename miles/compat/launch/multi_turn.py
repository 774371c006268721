"""Read miles' multi-turn function with its flags (``--generate-…``) as the environment that does its work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from miles.base.flags import Errors
from miles.compat.launch.foreign import Foreign, refused
from miles.compat.launch.paths import is_missing, names_function_of_others
from miles.config.notes import READ_AS, Note, note_on
from miles.config.settings import Settings
from miles.tasks.environments.built_in.tool_calls import ENVIRONMENT

TAIL = "rollout.generate_hub.multi_turn.generate"
_TURNS, _PARSER, _SEVERAL = "--generate-max-turns", "--generate-tool-call-parser", "--generate-multi-samples"
_SPECS, _CALL = "--generate-tool-specs-path", "--generate-execute-tool-function-path"
_DEFAULT_TURNS = "16"  # there
_READ_FORMS = ("qwen", "qwen25", "hermes")  # parsers of <tool_call>{json}</tool_call>

MULTI_TURN_FLAGS: list[Foreign] = refused(
    f"a setting of {TAIL}, which the command does not name",
    "drop it, or use --environment tool_calls:call=module.function with --max-turns",
    *(f"{flag} V" for flag in (_TURNS, _SPECS, _PARSER, _CALL)),
    _SEVERAL,
    accepted_if=lambda settings, given: (
        settings.rollout.environment is not None and settings.rollout.environment.startswith(f"{ENVIRONMENT.name}:")
    ),
    accepted_why="--environment tool_calls has what it says",
)


def normalize_multi_turn(
    settings: Settings, foreign: Mapping[str, Any], errors: Errors
) -> tuple[Settings, dict[str, Any], list[Note]]:
    """Replace the function by ``--environment tool_calls``, if the command names it.

    Args:
        settings: The settings, as they were given.
        foreign: The flags of other launchers in the command, with their values.
        errors: Collects what cannot be obeyed.

    Returns:
        The settings, the flags that are left to judge, and what was read as what.
    """
    path = settings.rollout.custom_generate_function_path
    if path is None or not names_function_of_others("custom_generate_function_path", path, TAIL):
        return settings, dict(foreign), []
    own = {_TURNS, _SPECS, _PARSER, _CALL, _SEVERAL}
    left = {flag: value for flag, value in foreign.items() if flag not in own}
    turns, specs, call = foreign.get(_TURNS, _DEFAULT_TURNS), foreign.get(_SPECS), foreign.get(_CALL)
    _check(foreign, turns, errors)
    if call is None:
        rule = "no function is named that runs the calls of the model"
        errors.add(f"--custom-generate-function-path {path}: {rule}; add {_CALL} module.function")
        return settings, left, []
    for flag, value, signature in (
        (_CALL, call, "async def call(name: str, arguments: dict) -> str"),
        (_SPECS, specs, "a list of tools, in the form of OpenAI's API"),
    ):
        if value is not None and is_missing(value):
            errors.add(f"{flag} {value}: this is part of another launcher, and is not here; write {signature}")
    environment = f"{ENVIRONMENT.name}:call={call}" + (f",specs={specs}" if specs else "")
    rollout = replace(
        settings.rollout,
        custom_generate_function_path=None,
        environment=environment,
        max_turns=int(turns) if str(turns).isdecimal() else None,
    )
    why = f"--environment {environment} --max-turns {turns} --apply-chat-template"
    settings = replace(settings, rollout=rollout, data=replace(settings.data, apply_chat_template=True))
    return settings, left, [note_on(READ_AS, "custom_generate_function_path", path, why)]


def _check(foreign: Mapping[str, Any], turns: Any, errors: Errors) -> None:
    if not str(turns).isdecimal() or int(turns) < 1:
        errors.add(f"{_TURNS} {turns}: must be a whole number of at least 1; correct the value")
    parser = foreign.get(_PARSER)
    if parser is not None and parser not in _READ_FORMS:
        rule = "calls are read as <tool_call>{json}</tool_call>, the form of Hermes and Qwen"
        what_to_do = (
            f"use a model that writes it, and give {', '.join(_READ_FORMS)}, or read the calls in --environment"
        )
        errors.add(f"{_PARSER} {parser}: {rule}; {what_to_do} module:class")
    if _SEVERAL in foreign:
        rule = "the turns of a trajectory are one sample, as long as the chat template can continue it"
        errors.add(f"{_SEVERAL}: {rule}; drop it")
