"""Read miles' multi-turn function with its flags (``--generate-…``) as the environment that does its work."""

from __future__ import annotations

from miles.compat.functions import is_missing, names_function_of_others
from miles.compat.line import Line
from miles.tasks.environments.built_in.tool_calls import ENVIRONMENT

FLAG, TAIL = "--custom-generate-function-path", "rollout.generate_hub.multi_turn.generate"
_TURNS, _PARSER, _SEVERAL = "--generate-max-turns", "--generate-tool-call-parser", "--generate-multi-samples"
_SPECS, _CALL = "--generate-tool-specs-path", "--generate-execute-tool-function-path"
_DEFAULT_TURNS = "16"  # there
_READ_FORMS = ("qwen", "qwen25", "hermes")  # parsers of <tool_call>{json}</tool_call>


def read_multi_turn(line: Line) -> None:
    """Replace the function by ``--environment tool_calls``, if the command names it."""
    path = line.value(FLAG)
    if path is None or not names_function_of_others(path, TAIL):
        return
    own = {flag: line.foreign.pop(flag, None) for flag in (_TURNS, _SPECS, _PARSER, _CALL, _SEVERAL)}
    turns, specs, call = own[_TURNS] or _DEFAULT_TURNS, own[_SPECS], own[_CALL]
    _check(turns, own[_PARSER], own[_SEVERAL], line)
    if call is None:
        rule = "no function is named that runs the calls of the model"
        line.errors.add(f"{FLAG} {path}: {rule}; add {_CALL} module.function")
        return
    for flag, value, signature in (
        (_CALL, call, "async def call(name: str, arguments: dict) -> str"),
        (_SPECS, specs, "a list of tools, in the form of OpenAI's API"),
    ):
        if value is not None and is_missing(value):
            line.errors.add(f"{flag} {value}: this is part of another launcher, and is not here; write {signature}")
    environment = f"{ENVIRONMENT.name}:call={call}" + (f",specs={specs}" if specs else "")
    line.drop("--environment", "--max-turns")
    words = ("--environment", environment, *(("--max-turns", turns) if turns.isdecimal() else ()))
    why = f"--environment {environment} --max-turns {turns} --apply-chat-template"
    line.read_as(FLAG, why, *words, "--apply-chat-template")


def _check(turns: str, parser: str | None, several: bool | None, line: Line) -> None:
    if not turns.isdecimal() or int(turns) < 1:
        line.errors.add(f"{_TURNS} {turns}: must be a whole number of at least 1; correct the value")
    if parser is not None and parser not in _READ_FORMS:
        rule = "calls are read as <tool_call>{json}</tool_call>, the form of Hermes and Qwen"
        what_to_do = (
            f"use a model that writes it, and give {', '.join(_READ_FORMS)}, or read the calls in --environment"
        )
        line.errors.add(f"{_PARSER} {parser}: {rule}; {what_to_do} module:class")
    if several:
        rule = "the turns of a trajectory are one sample, as long as the chat template can continue it"
        line.errors.add(f"{_SEVERAL}: {rule}; drop it")
