"""Check a reward function on cases: answers with the rewards that they should get.

The function runs as in a run: in its own process, with the time and memory limits. A built-in reward takes its flags,
as in a run. Exit status 0: all cases get the expected reward; 1: some do not; 2: the function or the cases cannot be
read.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path

# A private name of a pinned version (argparse-dataclass 2.0), as in config/parser.py.
from argparse_dataclass import _add_dataclass_options

from miles.base.flags import Errors, refuse
from miles.base.host import memory_limit
from miles.base.junit import CheckResult, write_junit
from miles.base.text import InputError, one_line
from miles.config.command_parser import CommandParser
from miles.config.needs import without_effect
from miles.config.settings import Settings
from miles.tasks.rewards.built_in import REWARDS
from miles.tasks.rewards.cases import check_cases, read_cases
from miles.tasks.rewards.registry import get_reward_function
from miles.tasks.rewards.settings import CUSTOM, RewardArguments, check_reward, reward_weights
from miles.types.sample import Sample

SECONDS = 60.0


def main(argv: Sequence[str]) -> int:
    """Print a table of the failures and return 0 or 1.

    Raises:
        SystemExit: With status 2 for wrong arguments, cases that are malformed, or a function that cannot be imported.
    """
    parser = CommandParser(prog="miles check-reward", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "function", metavar="FUNCTION", help="module:function, or what --rm-type names: math, or math:1,repetition:0.2"
    )
    parser.add_argument(
        "--cases", type=Path, required=True, metavar="FILE", help="JSON lines: response, label, expected"
    )
    parser.add_argument("--reward-key", metavar="KEY", help="key of the reward if the function returns objects")
    parser.add_argument(
        "--reward-timeout", type=float, default=SECONDS, help=f"seconds that a call may take (default: {SECONDS:g})"
    )
    parser.add_argument("--reward-memory", type=float, metavar="GIB", help="GiB that its processes may use together")
    parser.add_argument("--custom-rm-path", metavar="PATH", help="the function that custom names in a weighted sum")
    for flags in REWARDS.own_flags:
        _add_dataclass_options(flags, parser.add_argument_group(*(flags.__doc__ or "").split(": ", 1)))
    parser.add_argument("--tolerance", type=float, default=1e-6, help="difference that still counts as equal (1e-6)")
    parser.add_argument("--tokenizer", metavar="PATH", help="fills response_ids, which are empty otherwise")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write the results as JUnit XML")
    given = parser.parse_args(list(argv))
    for flag, value in (("--reward-timeout", given.reward_timeout), ("--tolerance", given.tolerance)):
        if not 0 <= value < float("inf"):
            parser.error(f"{flag} {value:g}: must be finite and at least 0; give 0 or more")
    try:
        results = _check(given)
        if given.junit is not None:
            write_junit(given.junit, f"check-reward {given.function}", results)
    except (InputError, ValueError, OSError) as error:
        parser.error(str(error))
    return _report(results)


def _check(given: argparse.Namespace) -> list[CheckResult]:
    cases = read_cases(given.cases)
    settings, notes = without_effect(Settings(reward=_reward(given)))
    for note in notes:
        print(f"{note.written}: has no effect ({note.why})")
    reward, errors = settings.reward, Errors()
    errors.declared(reward)
    check_reward(reward, True, errors)
    errors.raise_if_any()
    function = get_reward_function(reward, memory_limit(reward.reward_memory))
    token_ids: list[list[int]] = [[] for _ in cases]
    if given.tokenizer is not None:
        from miles.base.tokenizer import load_tokenizer  # transformers takes seconds

        tokenizer = load_tokenizer(given.tokenizer)
        token_ids = [list(tokenizer(case.response, add_special_tokens=False)["input_ids"]) for case in cases]
    samples: list[Sample] = [
        case.sample(number, ids) for number, (case, ids) in enumerate(zip(cases, token_ids, strict=True))
    ]
    return asyncio.run(check_cases(cases, samples, function, given.tolerance))


def _reward(given: argparse.Namespace) -> RewardArguments:
    """Return the section that the arguments describe."""
    names = {field.name for field in fields(RewardArguments)}
    values = {name: value for name, value in vars(given).items() if name in names and value is not MISSING}
    words = given.function.split(",")
    if all(word.partition(":")[0] in (*REWARDS, CUSTOM) for word in words):
        values["rm_type"] = given.function
        if CUSTOM not in reward_weights(given.function):
            if given.custom_rm_path is not None:
                rule = f"names a second reward, alongside {given.function}"
                refuse("custom_rm_path", given.custom_rm_path, rule, f"weigh both: {given.function},{CUSTOM}:0.5")
            # the command's own limits are for functions of the user's
            values = {name: value for name, value in values.items() if name not in ("reward_timeout", "reward_memory")}
    else:
        values["custom_rm_path"] = given.function
    return RewardArguments(**values)


def _report(results: Sequence[CheckResult]) -> int:
    failures = [result for result in results if result.fault is not None]
    width = max((len(result.name) for result in failures), default=0)
    for result in failures:
        print(f"FAILED  {result.name:{width}}  {one_line(result.fault or '', 300)}")
    slowest = max(result.seconds for result in results)
    print(f"{len(results) - len(failures)} of {len(results)} checks passed, the slowest call took {slowest:.2f} s")
    return 1 if failures else 0
