"""The abilities of a user's generate function, and the reports of its mistakes."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.base.user_code import UserCodeError
from miles.config.rollout import RolloutArguments
from miles.engine.base import Generation, SamplingParams
from miles.rollout import trajectory as trajectories
from miles.rollout.chosen_generator import get_group_generator
from miles.rollout.groups import GroupSpec, generate_group, response_seed
from miles.rollout.trajectory import generate_trajectories, token_ids_with
from miles.types.images import PromptImages
from miles.types.sample import NO_WEIGHTS, Prompt, PromptGroup, SampleStatus

PROMPT = Prompt("12*3", (1, 2, 3), source="set.jsonl:4")


class Digits:
    """Token i reads as the digit i; 0 is the end of the sequence."""

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(str(i) for i in token_ids if i)

    def encode(self, text, *, add_special_tokens):
        return [int(character) for character in text]

    def get_vocab(self):
        return {str(i): i for i in range(20)}


async def generate(engine, function, max_new=20, n_samples=3, prompt=PROMPT, **options):
    spec = GroupSpec(SamplingParams(max_new), n_samples, response_seed, **options)
    origin = "--custom-generate-function-path mine:generate"
    return await generate_trajectories(function, origin, PromptGroup(5, prompt), engine, Digits(), spec)


async def test_one_turn_is_what_the_default_gives(scripted_engine):
    async def one_turn(trajectory):
        await trajectory.generate()

    spec = GroupSpec(SamplingParams(20), 3, response_seed)
    default = await generate_group(PromptGroup(5, PROMPT), scripted_engine(), Digits(), spec)
    assert await generate(scripted_engine(), one_turn) == default


@given(turns=st.integers(1, 4), said=st.text("123456789", min_size=1, max_size=4), max_new=st.integers(1, 30))
def test_columns_stay_in_step_and_only_the_model_is_trained(scripted_engine, turns, said, max_new):
    engine = scripted_engine()

    async def talk(trajectory):
        for _ in range(turns):
            await trajectory.generate()
            if trajectory.finished:
                return
            trajectory.append(said)
        await trajectory.generate()

    group = asyncio.run(generate(engine, talk, max_new))
    assert [s.trajectory_id for s in group.samples] == [15, 16, 17]
    for sample in group.samples:
        sample.check()
        assert len(sample.response_ids) <= max_new
        assert [v == NO_WEIGHTS for v in sample.weight_versions] == [m == 0 for m in sample.loss_mask]
        assert all(p == 0 for p, m in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if m == 0)
        environment = "".join(str(i) for i, m in zip(sample.response_ids, sample.loss_mask, strict=True) if m == 0)
        assert (said * turns).startswith(environment)
        if len(sample.response_ids) == max_new and sample.loss_mask[-1] == 0:
            assert sample.status is SampleStatus.TRUNCATED
    # every turn is asked for with all that came before it
    for request in engine.requests:
        assert request.prompt_ids[:3] == PROMPT.token_ids
        assert len(request.prompt_ids) - 3 + request.sampling.max_new_tokens <= max_new


async def test_text_with_the_placeholder_of_an_image_is_not_appended(scripted_engine):
    async def show(trajectory):
        await trajectory.generate()
        trajectory.append("59")

    images = PromptImages((b"",), ((1, 1),), (1,), (1,), 9, "model")
    prompt = replace(PROMPT, token_ids=(1, 9, 3), images=images)
    with pytest.raises(ValueError, match=r"append\('59'\): it takes no images"):
        await generate(scripted_engine(), show, prompt=prompt)


async def test_each_turn_has_a_seed_of_its_own(scripted_engine):
    engine = scripted_engine()

    async def three_turns(trajectory):
        for _ in range(3):
            await trajectory.generate(max_new_tokens=2)

    await generate(engine, three_turns, n_samples=4)
    seeds = [request.seeds for request in engine.requests]
    assert len(set(seeds)) == len(seeds) == 12


async def test_stop_tokens_are_those_that_contain_the_character(scripted_engine):
    engine = scripted_engine()

    async def call(trajectory):
        await trajectory.generate(stop_token_ids=token_ids_with(trajectory.tokenizer, "1"))

    await generate(engine, call)
    assert engine.requests[0].sampling.stop_token_ids == (1, *range(10, 20))


async def test_an_aborted_trajectory_is_finished(tokenizer):
    class Aborting:
        async def generate(self, request):
            return [Generation([4], [-1.0], "abort", 2)]

    async def insist(trajectory):
        for _ in range(3):
            await trajectory.generate()

    group = await generate(Aborting(), insist)
    assert {(s.status, len(s.response_ids)) for s in group.samples} == {(SampleStatus.ABORTED, 1)}


async def test_a_trajectory_may_become_several_samples(scripted_engine):
    async def compact(trajectory):
        await trajectory.generate()
        return [trajectory.sample, replace(trajectory.sample, prompt=replace(PROMPT, token_ids=(9,)))]

    group = await generate(scripted_engine(), compact)
    assert [s.trajectory_id for s in group.samples] == [15, 15, 16, 16, 17, 17]


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (lambda sample: "text", "returned 'text' for set.jsonl:4; return None"),
        (lambda sample: [], "return None"),
        (
            lambda sample: [replace(sample, trajectory_id=99)],
            r"trajectory_id 99, but its trajectory has group 5 and trajectory_id 1\d",
        ),
        (lambda sample: [replace(sample, loss_mask=[])], "loss_mask has 0 entries"),
        (
            lambda sample: [replace(sample, response_ids=[], loss_mask=[], rollout_log_probs=[], weight_versions=[])],
            "has no response",
        ),
    ],
)
async def test_wrong_answers_are_refused(scripted_engine, answer, fault):
    async def wrong(trajectory):
        await trajectory.generate()
        return answer(trajectory.sample)

    with pytest.raises(ValueError, match=fault):
        await generate(scripted_engine(), wrong)


async def test_a_prompt_without_room_is_refused(scripted_engine):
    with pytest.raises(ValueError, match="--rollout-max-context-len 3.*set.jsonl:4"):
        await generate(scripted_engine(), None, max_context_len=3)


def test_the_flag_chooses_the_function(monkeypatch):
    assert get_group_generator(RolloutArguments()) is generate_group
    monkeypatch.setattr(trajectories, "mine", lambda trajectory: None, raising=False)
    path = "miles.rollout.trajectory:mine"
    assert get_group_generator(RolloutArguments(custom_generate_function_path=path)) is not generate_group
    with pytest.raises(ValueError, match="--custom-generate-function-path no.such"):
        get_group_generator(RolloutArguments(custom_generate_function_path="no.such:function"))


async def test_a_function_that_exits_fails_its_group_and_leaves_the_event_loop(scripted_engine, monkeypatch):
    async def exits(trajectory):
        raise SystemExit("no server")

    monkeypatch.setattr(trajectories, "exits", exits, raising=False)
    path = "miles.rollout.trajectory:exits"
    make = get_group_generator(RolloutArguments(custom_generate_function_path=path))
    group, spec = PromptGroup(5, PROMPT), GroupSpec(SamplingParams(20), 2, response_seed)
    with pytest.raises(UserCodeError, match=f"--custom-generate-function-path {path}: raised SystemExit: no server"):
        await make(group, scripted_engine(), Digits(), spec)
