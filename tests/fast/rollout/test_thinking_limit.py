"""Reasoning that takes too long is ended, and only the model's tokens are trained on."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config.rollout import RolloutArguments
from miles.engine.base import Generation, SamplingParams
from miles.rollout.chosen_generator import get_group_generator
from miles.rollout.groups import GroupSpec, response_seed
from miles.rollout.metrics import response_metrics
from miles.types.sample import Prompt, PromptGroup, SampleStatus

PROMPT = Prompt("2+3", (1, 2, 3), source="set.jsonl:4")
THINKS, ENDS, ANSWERS, EOS = 1, 9, 5, 0  # tokens of the model
INTERRUPTION = [7, 7, ENDS]


class Digits:
    """Token i reads as the digit i; 0 is the end of the sequence, and 9 a special token."""

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(str(i) for i in token_ids if i != EOS and not (skip_special_tokens and i == ENDS))

    def encode(self, text, *, add_special_tokens):
        return [int(character) for character in text]


class Reasoner:
    """A model that thinks for ``thoughts`` tokens, unless its reasoning is ended before, and then answers."""

    def __init__(self, thoughts):
        self.thoughts = thoughts

    async def generate(self, request):
        so_far = list(request.prompt_ids[len(PROMPT.token_ids) :])
        rest = [ANSWERS, ANSWERS, EOS]
        if ENDS not in so_far:
            rest = [THINKS] * (self.thoughts - len(so_far)) + [ENDS, *rest]
        else:
            rest = rest[len(so_far) - so_far.index(ENDS) - 1 :]
        written = rest[: request.sampling.max_new_tokens]
        reason = "stop" if written[-1] == EOS else "length"
        return [Generation(written, [-0.5] * len(written), reason, weight_version=3) for _ in request.seeds]


def respond(thoughts, max_new, group=5, **flags):
    generate = get_group_generator(RolloutArguments(thinking_end="9", thinking_interruption="779", **flags))
    spec = GroupSpec(SamplingParams(max_new), 1, response_seed)
    made = generate(PromptGroup(group, PROMPT), Reasoner(thoughts), Digits(), spec)
    [sample] = asyncio.run(made).samples
    sample.check()
    return sample


@given(thoughts=st.integers(0, 12), limit=st.integers(1, 12), answer_len=st.integers(1, 8))
def test_only_reasoning_beyond_the_limit_is_interrupted(thoughts, limit, answer_len):
    max_new = limit + answer_len
    sample = respond(thoughts, max_new, thinking_max_len=limit)
    if thoughts < limit:  # its end is among the first tokens
        assert sample == respond(thoughts, max_new)
    else:
        whole = [THINKS] * limit + INTERRUPTION + [ANSWERS, ANSWERS, EOS]
        assert sample.response_ids == whole[:max_new]
        not_the_models = range(limit, limit + len(INTERRUPTION))
        assert sample.loss_mask == [int(i not in not_the_models) for i in range(len(sample.response_ids))]
        assert sample.status is (SampleStatus.COMPLETED if len(whole) <= max_new else SampleStatus.TRUNCATED)


def test_the_limit_is_drawn_for_each_response_from_its_range_and_repeats():
    def limits(groups, **flags):
        samples = [respond(99, 40, group=group, thinking_max_len=12, **flags) for group in groups]
        return [sample.response_ids.index(INTERRUPTION[0]) for sample in samples]

    drawn = limits(range(200), thinking_min_len=9)
    assert set(drawn) == {9, 10, 11, 12}
    assert limits(range(200), thinking_min_len=9) == drawn, "the seed of a response decides"
    assert set(limits(range(5))) == {12}


@pytest.mark.parametrize(("thoughts", "fraction"), [(2, 0.0), (6, 1.0)])
def test_interrupted_responses_are_counted(thoughts, fraction):
    metrics = response_metrics([respond(thoughts, 20, thinking_max_len=4)])
    assert metrics["appended_fraction"].value == fraction
