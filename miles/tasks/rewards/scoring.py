"""Score a batch of samples, and handle a reward function that fails."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from miles.base.text import one_line
from miles.base.user_code import UserCodeError, UserCodeTimeout
from miles.tasks.rewards.base import NotAReward, RewardFunction, RewardSum, as_reward
from miles.tasks.rewards.reward_process import RewardProcessDied, RewardStuck
from miles.types.sample import Sample

_logger = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """The reward function raised an exception (the ``__cause__``) or returned something other than rewards."""


async def score(
    samples: Sequence[Sample], function: RewardFunction, error_value: float | None, *, drop: bool = False
) -> int:
    """Set the ``reward`` of every sample, aborted and truncated ones too; return how many the function fails on.

    A sample whose program or environment failed is treated like one that the function fails on, and not given to it.
    The function is called once with all others. If that fails, it is called with each sample alone to find those at
    fault. They get ``error_value``, or with ``drop`` no reward, and a line in the log.

    Raises:
        RewardError: With ``error_value`` None and without ``drop``, for the first sample at fault or failed, or for a
            batch that fails although no sample alone does; in any case for a function that does not return any more.
            No reward is set then.
    """
    if any(sample.failure for sample in samples):
        return await _score_without_failed(samples, function, error_value, drop=drop)
    if not samples:
        return 0
    name = getattr(function, "reward_name", "")
    strict = error_value is None and not drop
    try:
        outcomes = _per_sample(samples, await function(samples), name)
    except Exception as error:  # whatever a user's function raises
        failure = _failure(samples, _fault(error), name, error)
        if isinstance(error, RewardStuck):
            raise _stuck(samples, error, name) from error
        if strict and isinstance(error, UserCodeTimeout):
            raise failure from error  # each sample alone might take as long again
        outcomes = await _one_by_one(samples, function, name, failure, strict=strict)
    failures = [outcome for outcome in outcomes if isinstance(outcome, RewardError)]
    if failures and strict:
        raise failures[0]
    for failure in failures:
        _logger.warning("%s: %s", "dropped by --reward-error" if drop else f"reward {error_value}", failure)
    reward_of_failed = None if drop else error_value
    for sample, outcome in zip(samples, outcomes, strict=True):
        sample.reward = float(outcome) if isinstance(outcome, float) else reward_of_failed
        sample.reward_parts = dict(outcome.parts) if isinstance(outcome, RewardSum) else {}
    return len(failures)


async def _score_without_failed(
    samples: Sequence[Sample], function: RewardFunction, error_value: float | None, *, drop: bool
) -> int:
    """Score the samples whose makers did not fail; the others are as if the reward function had failed on them."""
    failed = [sample for sample in samples if sample.failure]
    if error_value is None and not drop:
        raise RewardError(_maker_failure(failed[0]))
    for sample in failed:
        _logger.warning("%s: %s", "dropped by --reward-error" if drop else f"reward {error_value}", sample.failure)
        sample.reward = None if drop else error_value
    return len(failed) + await score([s for s in samples if not s.failure], function, error_value, drop=drop)


def _maker_failure(sample: Sample) -> str:
    return (
        f"{sample.failure}; prompt {one_line(sample.prompt.source, 200)}, group "
        f"{sample.group_index}, trajectory {sample.trajectory_id}; fix that, give such trajectories a reward "
        "with --reward-error-value, or drop them with --reward-error drop"
    )


async def _one_by_one(
    samples: Sequence[Sample], function: RewardFunction, name: str, batch_failure: RewardError, *, strict: bool
) -> list[float | RewardError]:
    if len(samples) == 1:
        return [batch_failure]

    async def alone(sample: Sample) -> float | RewardError:
        try:
            return _per_sample([sample], await function([sample]), name)[0]
        except RewardStuck as error:
            raise _stuck([sample], error, name) from error
        except Exception as error:
            return _failure([sample], _fault(error), name, error)

    if isinstance(batch_failure.__cause__, UserCodeTimeout):  # one after another might take as long for each
        try:
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(alone(sample)) for sample in samples]
        except ExceptionGroup as stuck:  # the other calls have been cancelled
            raise stuck.exceptions[0] from stuck.exceptions[0].__cause__
        outcomes = [call.result() for call in calls]
    else:
        outcomes = [await alone(sample) for sample in samples]
    if not any(isinstance(outcome, RewardError) for outcome in outcomes):
        if strict:
            raise batch_failure
        _logger.warning("scored one by one, which succeeded: %s", batch_failure)
    return outcomes


def _per_sample(samples: Sequence[Sample], results: Any, name: str) -> list[float | RewardError]:
    """Return a float (a ``RewardSum`` unchanged) for each finite number.

    Raises:
        TypeError: There is not one result per sample.
    """
    if isinstance(results, (str, bytes, dict)) or not hasattr(results, "__len__"):
        raise TypeError(f"it returned {type(results).__name__} {results!r:.80}; return a list, one number per sample")
    if len(results) != len(samples):
        raise TypeError(f"it returned {len(results)} rewards for {len(samples)} samples; return one per sample")
    outcomes: list[float | RewardError] = []
    for sample, result in zip(samples, results, strict=True):
        reward = result if isinstance(result, NotAReward) else as_reward(result)
        if isinstance(reward, NotAReward):
            outcomes.append(_failure([sample], reward, name))
        else:
            outcomes.append(result if isinstance(result, RewardSum) else reward)
    return outcomes


def _fault(error: Exception) -> str:
    if isinstance(error, UserCodeTimeout):
        return f"{error} (--reward-timeout)"
    if isinstance(error, UserCodeError | RewardProcessDied):
        return str(error)
    return f"raised {type(error).__name__}: {error}"


def _stuck(samples: Sequence[Sample], error: RewardStuck, name: str) -> RewardError:
    return RewardError(
        f"the reward function {one_line(name, 100)} {one_line(_fault(error), 300)}; prompt "
        f"{one_line(samples[0].prompt.source, 200)}; correct it or what it waits for, or give it more time with "
        "--reward-timeout"
    )


def _failure(samples: Sequence[Sample], fault: str, name: str, cause: Exception | None = None) -> RewardError:
    first = samples[0]
    of_batch = f" (the first of {len(samples)} in the call)" if len(samples) > 1 else ""
    error = RewardError(
        f"the reward function {one_line(name, 100)}{' ' if name else ''}{one_line(fault, 200)}; "
        f"prompt {one_line(first.prompt.source, 200)}, group {first.group_index}, "
        f"trajectory {first.trajectory_id}{of_batch}, response {one_line(first.response, 80)!r}; fix the reward "
        "function or the data, give such samples a reward with --reward-error-value, or drop them with "
        "--reward-error drop"
    )
    error.__cause__ = cause
    for note in getattr(cause, "__notes__", ()):  # the traceback of the user's file; causes do not leave a process
        error.add_note(note)
    return error
