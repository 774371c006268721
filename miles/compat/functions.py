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

ZERO_REWARD = "miles.tasks.rewards.built_in.zero:zero"

_TABLE = table("functions")["function"]
# (flag, function elsewhere without the name of its package) -> ours; None is what the run does without the flag.
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
            continue  # no filter is called beside that function: the validator says so
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
