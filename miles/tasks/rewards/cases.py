"""Cases of a reward function: answers with the rewards that they should get, and the check that they do.

A case is a line of JSON: ``{"response": "42", "label": "42", "expected": 1.0}``. The function runs as it does in a run:
in its own process, with the time and memory limits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from miles.base import strict_json
from miles.base.flags import LARGEST_FLOAT
from miles.base.junit import CheckResult
from miles.base.text import InputError, one_line
from miles.tasks.rewards.base import RewardFunction
from miles.tasks.rewards.scoring import RewardError, score
from miles.types.sample import Prompt, Sample, SampleStatus

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
        shown = one_line(json.dumps(value), 60)
        _refuse(where, f"expected is {shown}", "give a finite number, or two as [lowest, highest]")
    return float(numbers[0]), float(numbers[1])


def _refuse(where: str, fault: str, what_to_do: str) -> NoReturn:
    raise InputError(one_line(f"{where}: {fault}; {what_to_do}", 1000))


async def check_cases(
    cases: Sequence[RewardCase], samples: Sequence[Sample], function: RewardFunction, tolerance: float
) -> list[CheckResult]:
    """Score each case alone, then all in one call as a run does, and compare with the expected rewards."""
    results = [
        await _check(case.name, [case], [sample], function, tolerance)
        for case, sample in zip(cases, samples, strict=True)
    ]
    if len(cases) > 1 and all(result.fault is None for result in results):
        results.append(await _check(ALL_AT_ONCE, cases, samples, function, tolerance))
    return results


async def _check(
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
