from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.config.rollout import RolloutArguments
from miles.engine.base import SamplingParams
from miles.rollout.groups import (
    GroupSpec,
    fit_context,
    generate_group,
    response_seed,
    sampling_params,
)
from miles.types.sample import Prompt, PromptGroup, SampleStatus

PROMPT = Prompt("1+1=", (1, 2, 3), source="set.jsonl:4")


async def generate(engine, tokenizer, group_index=5, **options):
    group = PromptGroup(group_index, PROMPT)
    spec = GroupSpec(SamplingParams(max_new_tokens=8), 4, partial(response_seed, 42), **options)
    return await generate_group(group, engine, tokenizer, spec)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 999), st.integers(0, 99)), unique=True, max_size=50))
def test_seeds_are_distinct_63_bit_numbers(parts):
    seeds = [response_seed(*p) for p in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_never_change_between_versions():
    assert response_seed(42, 0, 0) == 5541750418643057087


async def test_a_group_is_one_request_and_repeats_exactly(scripted_engine, tokenizer):
    engine = scripted_engine()
    first, again = await generate(engine, tokenizer), await generate(engine, tokenizer)
    assert first == again
    assert len(engine.requests) == 2
    assert engine.requests[0].prompt_ids == PROMPT.token_ids
    assert len(set(engine.requests[0].seeds)) == 4


async def test_samples_hold_what_was_generated(scripted_engine, tokenizer):
    group = await generate(scripted_engine(), tokenizer)
    assert [s.trajectory_id for s in group.samples] == [20, 21, 22, 23]
    for sample in group.samples:
        assert sample.loss_mask == [1] * len(sample.response_ids)
        assert sample.response == "".join(map(str, sample.response_ids[:-1]))  # the end-of-sequence token is not shown
        assert (sample.group_index, sample.reward) == (5, None)
        assert sample.weight_versions == [3] * len(sample.response_ids)


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", SampleStatus.COMPLETED), ("length", SampleStatus.TRUNCATED), ("abort", SampleStatus.ABORTED)],
)
async def test_the_finish_reason_becomes_the_status(scripted_engine, tokenizer, reason, status):
    group = await generate(scripted_engine(finish=lambda seed: reason), tokenizer)
    assert {s.status for s in group.samples} == {status}


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 20))
def test_prompt_and_response_stay_within_the_context(max_new, max_context, prompt_len):
    prompt = Prompt("p", (1,) * prompt_len, source="set.jsonl:9")
    sampling = SamplingParams(max_new_tokens=max_new, temperature=0.5)
    if prompt_len >= max_context:
        with pytest.raises(ValueError, match=rf"--rollout-max-context-len {max_context}.*set.jsonl:9.*{prompt_len}"):
            fit_context(sampling, prompt, max_context)
        return
    fitted = fit_context(sampling, prompt, max_context)
    assert fitted.max_new_tokens == min(max_new, max_context - prompt_len)
    assert fitted.temperature == 0.5


def test_sampling_follows_the_flags():
    rollout = RolloutArguments(
        rollout_max_response_len=7,
        rollout_temperature=0.5,
        rollout_top_p=0.9,
        rollout_top_k=3,
        rollout_min_p=0.1,
        rollout_stop_token_ids=(8,),
    )
    assert sampling_params(rollout) == SamplingParams(7, 0.5, 0.9, 3, (8,), min_p=0.1, returns_support=True)
