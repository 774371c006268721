"""Check a reward function on cases: answers with the rewards that they should get.

The function runs as in a run: in its own process, with the time and memory limits. A built-in reward takes its flags,
as in a run. Exit status 0: all cases get the expected reward; 1: some do not; 2: the function or the cases cannot be
read.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

# A private name of a pinned version, as in config/parser.py.
from argparse_dataclass import _add_dataclass_options

from miles.base import strict_json
from miles.base.flags import LARGEST_FLOAT, Errors, refuse
from miles.base.host import memory_limit
from miles.base.junit import CheckResult, write_junit
from miles.base.text import InputError, one_line
from miles.config.command_parser import CommandParser
from miles.config.needs import without_effect
from miles.config.settings import Settings
from miles.tasks.rewards.base import RewardFunction
from miles.tasks.rewards.built_in import REWARDS
from miles.tasks.rewards.registry import get_reward_function
from miles.tasks.rewards.scoring import RewardError, score
from miles.tasks.rewards.settings import CUSTOM, RewardArguments, check_reward, reward_weights
from miles.types.sample import Prompt, Sample, SampleStatus

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
    options = parser.parse_args(list(argv))
    for flag, value in (("--reward-timeout", options.reward_timeout), ("--tolerance", options.tolerance)):
        if not 0 <= value < float("inf"):
            parser.error(f"{flag} {value:g}: must be finite and at least 0; give 0 or more")
    try:
        results = _check(options)
    except (InputError, ValueError, OSError) as error:
        parser.error(str(error))
    status = _report(results)
    if options.junit is not None:
        try:
            write_junit(options.junit, f"check-reward {options.function}", results)
        except OSError as error:
            parser.error(f"--junit {options.junit}: cannot be written ({error.strerror}); give another file")
    return status


def _check(options: argparse.Namespace) -> list[CheckResult]:
    cases = read_cases(options.cases)
    settings, notes = without_effect(Settings(reward=_reward(options)))
    for note in notes:
        print(f"{note.written}: has no effect ({note.why})")
    reward = settings.reward
    errors = Errors()
    errors.declared(reward)
    check_reward(reward, True, errors)
    errors.raise_if_any()
    function = get_reward_function(reward, memory_limit(reward.reward_memory))
    token_ids: list[list[int]] = [[] for _ in cases]
    if options.tokenizer is not None:
        from miles.base.tokenizer import load_tokenizer  # transformers takes seconds

        tokenizer = load_tokenizer(options.tokenizer)
        token_ids = [list(tokenizer(case.response, add_special_tokens=False)["input_ids"]) for case in cases]
    samples: list[Sample] = [
        case.sample(number, ids) for number, (case, ids) in enumerate(zip(cases, token_ids, strict=True))
    ]
    return asyncio.run(check_cases(cases, samples, function, options.tolerance))


def _reward(options: argparse.Namespace) -> RewardArguments:
    """Return the section that the arguments describe."""
    names = {field.name for field in fields(RewardArguments)}
    values = {name: value for name, value in vars(options).items() if name in names and value is not MISSING}
    words = options.function.split(",")
    if all(word.partition(":")[0] in (*REWARDS, CUSTOM) for word in words):
        values["rm_type"] = options.function
        if CUSTOM not in reward_weights(options.function):
            if options.custom_rm_path is not None:
                rule = f"names a second reward, alongside {options.function}"
                refuse("custom_rm_path", options.custom_rm_path, rule, f"weigh both: {options.function},{CUSTOM}:0.5")
            # the command's own limits are for functions of the user's
            values = {name: value for name, value in values.items() if name not in ("reward_timeout", "reward_memory")}
    else:
        values["custom_rm_path"] = options.function
    return RewardArguments(**values)


def _report(results: Sequence[CheckResult]) -> int:
    failures = [result for result in results if result.fault is not None]
    width = max((len(result.name) for result in failures), default=0)
    for result in failures:
        print(f"FAILED  {result.name:{width}}  {one_line(result.fault or '', 300)}")
    slowest = max(result.seconds for result in results)
    print(f"{len(results) - len(failures)} of {len(results)} checks passed, the slowest call took {slowest:.2f} s")
    return 1 if failures else 0


# Cases of a reward function: answers with the rewards that they should get, and the check that they do.
#
# A case is a line of JSON: ``{"response": "42", "label": "42", "expected": 1.0}``. The function runs as it does in a
# run: in its own process, with the time and memory limits.


KEYS = ("response", "expected", "label", "prompt", "metadata", "status", "name")
ALL_AT_ONCE = "all cases in one call"
_STATUSES = [status.value for status in SampleStatus if status is not SampleStatus.PENDING]


@dataclass(frozen=True)
class RewardCase:
    """An answer, and the lowest and highest reward that it may get."""

    name: str
    prompt: Prompt
    response: str
    status: SampleStatus
    low: float
    high: float

    def sample(self, number: int, response_ids: Sequence[int] = ()) -> Sample:
        """Return the answer as a reward function sees it; ``number`` is its trajectory."""
        tokens = len(response_ids)
        return Sample(
            self.prompt,
            group_index=number,
            trajectory_id=number,
            response_ids=list(response_ids),
            response=self.response,
            loss_mask=[1] * tokens,
            rollout_log_probs=[0.0] * tokens,
            status=self.status,
        )

    def fault(self, reward: float | None, tolerance: float) -> str | None:
        """Describe how ``reward`` differs from the expected range; None if it does not."""
        assert reward is not None, "score() raises if there is no reward"
        if self.low - tolerance <= reward <= self.high + tolerance:
            return None
        wanted = f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        return f"the reward is {reward:g}, expected {wanted}"


def read_cases(path: Path) -> list[RewardCase]:
    """Read a file of cases.

    Raises:
        InputError: It cannot be read or has no case, or a line is malformed; the message names the line and the key.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON text may hold the other separators
    except OSError as error:
        raise InputError(f"--cases {path}: cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--cases {path}: is not UTF-8 text; save it as UTF-8") from error
    cases = [_case(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not cases:
        raise InputError(f"--cases {path}: has no case; write one JSON object per line")
    return cases


def _case(line: str, where: str) -> RewardCase:
    try:
        row = strict_json.loads(line)
    except strict_json.StrictJsonError as error:
        raise InputError(f"{where}: {error}; write one JSON object per line") from error
    if not isinstance(row, dict):
        _refuse(where, "is not a JSON object", 'write {"response": "…", "label": "…", "expected": 1.0}')
    for key in row:
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            _refuse(where, f"unknown key {key}", f"did you mean {near[0]}?" if near else f"give {', '.join(KEYS)}")
    for key in ("response", "expected"):
        if key not in row:
            _refuse(where, f"has no {key}", "every case needs a response and the expected reward")
    for key in ("response", "prompt", "name"):
        if not isinstance(row.get(key, ""), str):
            _refuse(where, f"{key} is of type {type(row[key]).__name__}", "give text")
    metadata, status = row.get("metadata") or {}, row.get("status", "completed")
    if not isinstance(metadata, dict):
        _refuse(where, f"metadata is of type {type(metadata).__name__}", "give an object")
    if status not in _STATUSES:
        _refuse(where, f"status is {status!r}", f"give one of {', '.join(_STATUSES)}")
    low, high = _expected(row["expected"], where)
    prompt = Prompt(row.get("prompt", ""), (), row.get("label"), metadata, where)
    return RewardCase(row.get("name", where), prompt, row["response"], SampleStatus(status), low, high)


def _expected(value: Any, where: str) -> tuple[float, float]:
    """Return the lowest and highest reward: of a number, or of a pair."""
    bounds = value if isinstance(value, list) else [value, value]
    numbers = [bound for bound in bounds if isinstance(bound, int | float) and not isinstance(bound, bool)]
    # nan and inf, which no reward can be, fail the comparison; so does a number that no float holds
    are_rewards = all(abs(number) <= LARGEST_FLOAT for number in numbers)
    if len(bounds) != 2 or len(numbers) != 2 or not are_rewards or numbers[0] > numbers[1]:
        text = one_line(json.dumps(value), 60)
        _refuse(where, f"expected is {text}", "give a finite number, or two as [lowest, highest]")
    return float(numbers[0]), float(numbers[1])


def _refuse(where: str, fault: str, what_to_do: str) -> NoReturn:
    raise InputError(one_line(f"{where}: {fault}; {what_to_do}", 1000))


async def check_cases(
    cases: Sequence[RewardCase], samples: Sequence[Sample], function: RewardFunction, tolerance: float
) -> list[CheckResult]:
    """Score each case alone, then all in one call as a run does, and compare with the expected rewards."""
    results = [
        await _check_case(case.name, [case], [sample], function, tolerance)
        for case, sample in zip(cases, samples, strict=True)
    ]
    if len(cases) > 1 and all(result.fault is None for result in results):
        results.append(await _check_case(ALL_AT_ONCE, cases, samples, function, tolerance))
    return results


async def _check_case(
    name: str, cases: Sequence[RewardCase], samples: Sequence[Sample], function: RewardFunction, tolerance: float
) -> CheckResult:
    began = time.perf_counter()
    try:
        await score(samples, function, None)
    except RewardError as error:
        cause = error.__cause__
        details = "\n".join([str(error), *getattr(cause, "__notes__", ())])
        short = str(error).split("; prompt ")[0]  # the rest names the case, and flags of a run
        return CheckResult(name, time.perf_counter() - began, short, details)
    seconds = time.perf_counter() - began
    for case, sample in zip(cases, samples, strict=True):
        fault = case.fault(sample.reward, tolerance)
        if fault is not None:
            where = f"{case.name}: " if len(cases) > 1 else ""
            answer = one_line(case.response, 200)
            details = f"{fault}\nresponse: {answer!r}\nlabel: {case.prompt.label!r}"
            return CheckResult(name, seconds, where + fault, details)
    return CheckResult(name, seconds)
