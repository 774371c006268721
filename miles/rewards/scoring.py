"""Score a batch of samples, and handle a reward function that fails."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from miles.rewards.base import RewardFunction
from miles.rewards.user_code import UserCodeError, UserCodeTimeout
from miles.sample import Sample

_logger = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """The reward function raised an exception (the ``__cause__``) or returned something other than rewards."""


async def score(samples: Sequence[Sample], function: RewardFunction, error_value: float | None) -> int:
    """Set the ``reward`` of every sample, aborted and truncated ones too; return how many got ``error_value``.

    The function is called once with all samples. If that fails, it is called with each sample alone to find those at
    fault. They get ``error_value`` and a line in the log.

    Raises:
        RewardError: With ``error_value`` None, for the first sample at fault, or for a batch that fails although no
            sample alone does. No reward is set then.
    """
    if not samples:
        return 0
    try:
        outcomes = _per_sample(samples, await function(samples))
    except Exception as error:  # whatever a user's function raises
        failure = _failure(samples, _fault(error), error)
        if error_value is None and isinstance(error, UserCodeTimeout):
            raise failure from error  # each sample alone might take as long again
        outcomes = await _one_by_one(samples, function, failure, strict=error_value is None)
    failures = [outcome for outcome in outcomes if isinstance(outcome, RewardError)]
    if failures and error_value is None:
        raise failures[0]
    for failure in failures:
        _logger.warning("reward %s by --reward-error-value: %s", error_value, failure)
    for sample, outcome in zip(samples, outcomes, strict=True):
        sample.reward = error_value if isinstance(outcome, RewardError) else outcome
    return len(failures)


async def _one_by_one(
    samples: Sequence[Sample], function: RewardFunction, batch_failure: RewardError, *, strict: bool
) -> list[float | RewardError]:
    if len(samples) == 1:
        return [batch_failure]

    async def alone(sample: Sample) -> float | RewardError:
        try:
            return _per_sample([sample], await function([sample]))[0]
        except Exception as error:
            return _failure([sample], _fault(error), error)

    if isinstance(batch_failure.__cause__, UserCodeTimeout):  # one after another might take as long for each
        outcomes = list(await asyncio.gather(*map(alone, samples)))
    else:
        outcomes = [await alone(sample) for sample in samples]
    if not any(isinstance(outcome, RewardError) for outcome in outcomes):
        if strict:
            raise batch_failure
        _logger.warning("scored one by one, which succeeded: %s", batch_failure)
    return outcomes


def _per_sample(samples: Sequence[Sample], results: Any) -> list[float | RewardError]:
    """Return a float for each finite number; raise ``TypeError`` unless there is one result per sample."""
    if isinstance(results, (str, bytes, dict)) or not hasattr(results, "__len__"):
        raise TypeError(f"it returned {type(results).__name__} {results!r:.80}; return a list, one number per sample")
    if len(results) != len(samples):
        raise TypeError(f"it returned {len(results)} rewards for {len(samples)} samples; return one per sample")
    return [
        float(result)
        if isinstance(result, Real) and math.isfinite(result)
        else _failure([sample], f"returned {result!r:.80}, which is not a finite number (a float, say)")
        for sample, result in zip(samples, results, strict=True)
    ]


def _fault(error: Exception) -> str:
    if isinstance(error, UserCodeTimeout):
        return f"{error} (--reward-timeout)"
    return str(error) if isinstance(error, UserCodeError) else f"raised {type(error).__name__}: {error}"


def _failure(samples: Sequence[Sample], fault: str, cause: Exception | None = None) -> RewardError:
    first = samples[0]
    of_batch = f" (the first of {len(samples)} in the call)" if len(samples) > 1 else ""
    error = RewardError(
        f"the reward function {printable(fault, 200)}; prompt {first.prompt.source}, group {first.group_index}, "
        f"trajectory {first.trajectory_id}{of_batch}, response {printable(first.response, 80)!r}; fix the reward "
        "function or the data, or give such samples a reward with --reward-error-value"
    )
    error.__cause__ = cause
    return error


def printable(text: str, limit: int) -> str:
    """Return the start of ``text`` on one line, at most ``limit`` characters, without control characters."""
    start = "".join(c if c.isprintable() else " " for c in text[: limit + 1])
    return start if len(text) <= limit else start[: limit - 1] + "…"
