import asyncio
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.tasks.rewards.scoring import RewardError, score


async def scored(samples, function, error_value=None):
    async def awaited(batch):
        return function(batch)

    return await score(samples, awaited, error_value)


def parse_rewards(batch):
    """Fail for the whole batch if one response is malformed, like most batched functions."""
    return [float(s.response) for s in batch]


@given(st.lists(st.floats(-9, 9) | st.sampled_from(["bad", "nan", "inf"]), max_size=6))
def test_only_the_samples_at_fault_get_the_error_value(make_sample, responses):
    samples = [make_sample(str(r), trajectory_id=k) for k, r in enumerate(responses)]
    failures = asyncio.run(scored(samples, parse_rewards, error_value=-100.0))
    assert failures == sum(isinstance(r, str) for r in responses)
    assert [s.reward for s in samples] == [-100.0 if isinstance(r, str) else r for r in responses]


async def test_one_call_per_batch_if_nothing_fails(make_sample):
    sizes = []
    samples = [make_sample("1"), make_sample("2")]
    await scored(samples, lambda batch: sizes.append(len(batch)) or parse_rewards(batch))
    assert sizes == [2]


async def test_without_error_value_the_sample_is_named_and_nothing_is_set(make_sample):
    samples = [make_sample("1", trajectory_id=20), make_sample("bad " + "x" * 200, trajectory_id=21)]
    with pytest.raises(RewardError, match=r"raised ValueError: could not convert") as caught:
        await scored(samples, parse_rewards)
    message = str(caught.value)
    assert "prompts.jsonl:17, group 5, trajectory 21" in message
    assert repr("bad " + "x" * 75 + "…") in message and "x" * 76 not in message.split("response")[1]
    assert "--reward-error-value" in message
    assert isinstance(caught.value.__cause__, ValueError)
    assert [s.reward for s in samples] == [None, None]


@pytest.mark.parametrize("result", [math.nan, math.inf, 10**400, "1", b"1", None, [1.0], 1j])
async def test_results_that_are_not_rewards(make_sample, result):
    with pytest.raises(RewardError, match="not a finite number.* trajectory 1, "):
        await scored([make_sample("a"), make_sample("b", trajectory_id=1)], lambda batch: [1.0, result][-len(batch) :])


@pytest.mark.parametrize(
    ("returned", "fault"),
    [([1.0], "1 rewards for 2 samples"), (1.0, "returned float 1.0"), (None, "NoneType"), ({}, "dict"), ("ab", "str")],
)
async def test_results_that_are_not_a_list_of_rewards(make_sample, returned, fault):
    with pytest.raises(RewardError, match=fault):
        await scored([make_sample("a"), make_sample("b")], lambda batch: returned if len(batch) == 2 else [1.0])


async def test_numbers_of_any_library_become_floats(make_sample):
    samples = [make_sample("a") for _ in range(3)]
    await scored(samples, lambda batch: np.array([0, 1, 2], dtype=np.float32))
    assert [s.reward for s in samples] == [0.0, 1.0, 2.0]
    await scored(samples, lambda batch: (True, 1, np.int64(2)))
    assert [type(s.reward) for s in samples] == [float] * 3


async def test_a_batch_that_fails_though_no_sample_alone_does(make_sample):
    def overloaded(batch):
        if len(batch) > 1:
            raise ConnectionError("too much at once")
        return [1.0]

    samples = [make_sample("a"), make_sample("b")]
    with pytest.raises(RewardError, match="too much at once"):
        await scored(samples, overloaded)
    assert await scored(samples, overloaded, error_value=0.0) == 0
    assert [s.reward for s in samples] == [1.0, 1.0]


def test_a_message_is_one_short_line_without_control_characters(make_sample):
    async def shouts(samples):
        raise ValueError("x" * 10_000_000 + "\x1b[2J\n")

    with pytest.raises(RewardError) as caught:
        asyncio.run(score([make_sample("\x1b[31m\nred")], shouts, None))
    message = str(caught.value)
    assert len(message) < 600 and message.isprintable()
