"""Rewards see the text of special tokens that the model wrote, but for the one that ended its answer."""

import asyncio
from functools import partial

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from miles.engine.base import Generation, SamplingParams
from miles.rollout.groups import GroupSpec, answer_text, generate_group
from miles.rollout.trajectory import generate_trajectories
from miles.types.sample import Prompt, PromptGroup

WORDS = ["<unk>", "4", "2", "</think>", "<|im_end|>", "tool"]
PREFILL = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "2 "}]


@pytest.fixture(scope="module")
def words():
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    specials = {"additional_special_tokens": ["</think>"]}
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", **specials)


@pytest.mark.parametrize(
    ("ids", "mask", "ended", "stops", "expected"),
    [
        ([2, 3, 1, 4], [1, 1, 1, 1], True, (), "2 </think> 4"),
        ([3, 4], [1, 1], True, (), "</think>"),
        ([2, 3], [1, 1], False, (), "2 </think>"),
        ([2, 3], [1, 1], True, ("</think>",), "2 </think>"),
        ([2, 4], [1, 1], True, ("</think>",), "2"),
        ([2, 1], [1, 1], True, (), "2 4"),
        ([3, 1, 4, 5, 4, 2, 3], [1, 1, 1, 0, 0, 1, 1], False, (), "</think> 4 tool 2 </think>"),
        ([], [], True, (), ""),
    ],
)
def test_the_token_that_ended_an_answer_is_left_out(words, ids, mask, ended, stops, expected):
    assert answer_text(words, ids, mask, ended, stops) == expected


class OneAnswer:
    """Answers every request with the same tokens."""

    async def generate(self, request):
        return [Generation([3, 1, 4], [-1.0] * 3, "stop", 0) for _ in request.seeds]


async def one_turn(trajectory):
    await trajectory.generate()


@pytest.mark.parametrize("make", [generate_group, partial(generate_trajectories, one_turn, "one_turn")])
@pytest.mark.parametrize(("text", "before"), [("q 2 ", "2 "), ("q 2 <|im_end|> assistant", "")])
def test_rewards_see_what_the_prompt_has_of_the_answer(words, make, text, before):
    group = PromptGroup(0, Prompt(text, (1,), input=PREFILL))
    made = make(group, OneAnswer(), words, GroupSpec(SamplingParams(9), 1, lambda *_: 0))
    assert asyncio.run(made).samples[0].response == before + "</think> 4"
