"""Replace functions that a command names inside the packages of related launchers; refuse those without counterpart."""

from __future__ import annotations

import re

from miles.base.flags import flag_name
from miles.compat.line import Line
from miles.compat.verdicts import table
from miles.config.functions import HOOKS, has_source
from miles.config.notes import NO_EFFECT
from miles.objective.aggregation import MODE_FLAGS
from miles.objective.loss_types import LOSS_TYPES
from miles.objective.settings import LossArguments
from miles.tasks.environments.built_in.tool_calls import ENVIRONMENT

ZERO_REWARD = "miles.tasks.rewards.built_in.zero:zero"

_TABLE = table("functions")["function"]
# (flag, function elsewhere without the name of its package) -> ours; None is the run's behaviour without the flag.
KNOWN: dict[tuple[str, str], str | None] = {
    (row["flag"], there): row.get("here") for row in _TABLE if "flags" not in row for there in row["there"]
}
# The same, for functions whose work is done by flags here -> what to do.
FLAGS_INSTEAD: dict[tuple[str, str], str] = {
    (row["flag"], there): row["flags"] for row in _TABLE if "flags" in row for there in row["there"]
}
# Functions elsewhere that a run on conversations (--loss-type sft_loss) does not need.
FOR_CONVERSATIONS = {("--rollout-function-path", "rollout.sft_rollout.generate_rollout")}
# Generate ahead of the trainer without end, as --fully-async does.
FULLY_ASYNC = ("fully_async_rollout.generate_rollout_fully_async", "fully_async_rollout.FullyAsyncRolloutFn")
# Dr.GRPO's reducer, which divides the sum of a trajectory by a constant in its file.
_CONSTANT_REDUCER = re.compile(r"examples\.(experimental\.)?DrGRPO\.custom_reducer([.:]\w+)?")
CONSTANT_OF_REDUCER = 1000.0
# miles' multi-turn function, and its flags.
_GENERATE, MULTI_TURN = "--custom-generate-function-path", "rollout.generate_hub.multi_turn.generate"
_TURNS, _PARSER, _SEVERAL = "--generate-max-turns", "--generate-tool-call-parser", "--generate-multi-samples"
_SPECS, _CALL = "--generate-tool-specs-path", "--generate-execute-tool-function-path"
_DEFAULT_TURNS = "16"  # there
_READ_FORMS = ("qwen", "qwen25", "hermes")  # parsers of <tool_call>{json}</tool_call>
_PACKAGES = ("miles", "slime", "miles_plugins", "slime_plugins", "examples")


def read_functions(line: Line) -> None:
    """Replace functions of related launchers by ours, or by flags; refuse those that have no counterpart."""
    for field in HOOKS:
        flag = flag_name(field)
        path = line.value(flag)
        if path is None or has_source(path):
            continue
        is_known, ours = our_function(flag, path, _reads_conversations(line))
        if flag == "--rollout-function-path" and _ends_with(path, *FULLY_ASYNC):
            steps = line.value("--async-steps") or "1"
            line.drop("--async-steps")
            ahead = ("--fully-async", "--async-steps", steps)
            line.read_as(flag, " ".join(ahead), *ahead)
        elif flag == "--custom-pg-loss-reducer-function-path" and _CONSTANT_REDUCER.fullmatch(path):
            _read_constant_reducer(line, flag, path)
        elif is_known:
            line.read_as(flag, ours or "what the run does without it", *((flag, ours) if ours else ()))
        elif flag == "--dynamic-sampling-filter-path" and "--rollout-function-path" in line:
            continue  # no filter is called alongside that function: the validator reports it
        elif (message := missing_function(flag, path)) is not None:
            line.errors.add(message)


def _read_constant_reducer(line: Line, flag: str, path: str) -> None:
    for name in map(flag_name, MODE_FLAGS):
        if name in line:
            line.note(NO_EFFECT, name, f"{flag} {path} takes precedence")
            line.drop(name)
    constant = f"--loss-aggregation constant --loss-aggregation-divisor {CONSTANT_OF_REDUCER:g}"
    line.read_as(flag, constant, *constant.split())


def _reads_conversations(line: Line) -> bool:
    """Return whether the run trains on conversations, which other launchers collect by a function."""
    kind = LOSS_TYPES.get(line.value("--loss-type") or LossArguments.loss_type)
    return kind is not None and not kind.uses_advantages and "--load-debug-rollout-data" not in line


def read_multi_turn(line: Line) -> None:
    """Replace the function by ``--environment tool_calls``, if the command names it."""
    path = line.value(_GENERATE)
    if path is None or not names_function_of_others(path, MULTI_TURN):
        return
    own = {flag: line.foreign.pop(flag, None) for flag in (_TURNS, _SPECS, _PARSER, _CALL, _SEVERAL)}
    turns, specs, call = own[_TURNS] or _DEFAULT_TURNS, own[_SPECS], own[_CALL]
    _check_turns(turns, own[_PARSER], own[_SEVERAL], line)
    if call is None:
        rule = "no function is named that runs the calls of the model"
        line.errors.add(f"{_GENERATE} {path}: {rule}; add {_CALL} module.function")
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
    line.read_as(_GENERATE, why, *words, "--apply-chat-template")


def _check_turns(turns: str, parser: str | None, several: bool | None, line: Line) -> None:
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


def our_function(flag: str, path: str, reads_conversations: bool = False) -> tuple[bool, str | None]:
    """Return whether ``path`` names a function whose counterpart is here, and that one; None is the default."""
    name = (flag, _tail(path))
    if has_source(path) or not (name in KNOWN or (reads_conversations and name in FOR_CONVERSATIONS)):
        return False, None
    return True, KNOWN.get(name)


def names_function_of_others(path: str, tail: str) -> bool:
    """Return whether ``path`` names the function ``tail`` of a package of other launchers, and no file here has it."""
    return _tail(path) == tail and path.replace(":", ".") != tail and not has_source(path)


def is_missing(path: str) -> bool:
    """Return whether ``path`` is in a package of a related launcher, and not here."""
    return path.replace(":", ".").partition(".")[0] in _PACKAGES and not has_source(path)


def missing_function(flag: str, path: str) -> str | None:
    """Return the error of a path into a package of a related launcher whose function is not here."""
    of_flag = {tail: what_to_do for (name, tail), what_to_do in FLAGS_INSTEAD.items() if name == flag}
    instead = next((what_to_do for tail, what_to_do in of_flag.items() if _ends_with(path, tail)), None)
    if (instead is None and not is_missing(path)) or has_source(path):
        return None
    signature = next(hook.signature for field, hook in HOOKS.items() if flag_name(field) == flag)
    what_to_do = instead or f"write {signature}, and name it as module:function"
    return f"{flag} {path}: this function is part of another launcher, and is not here; {what_to_do}"


def _tail(path: str) -> str:
    """Return a path without the name of its package, with dots only: ``slime.rollout.x:f`` is ``rollout.x.f``."""
    dotted = path.replace(":", ".")
    package, _, rest = dotted.partition(".")
    return rest if package in _PACKAGES else dotted


def _ends_with(path: str, *names: str) -> bool:
    """Return whether a path names one of these functions, in any package."""
    dotted = path.replace(":", ".")
    return any(dotted == name or dotted.endswith("." + name) for name in names)
