"""Mixtures of prompt sets, and the curriculum that chooses weights and prompts."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DOUBLE_ERROR

from miles.base.text import InputError
from miles.tasks.data.stream import (
    Curriculum,
    CurriculumStream,
    Mixture,
    NamedSet,
    NoPromptsLeft,
    PromptStream,
)
from miles.types.sample import Prompt, Sample

SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=4)
DRAWS = st.lists(st.integers(0, 9), max_size=6)


def sets_of(sizes):
    names = "abcd"[: len(sizes)]
    return [
        NamedSet(name, [Prompt(f"{name}{i}", (i,), prompt_set=name) for i in range(size)])
        for name, size in zip(names, sizes, strict=True)
    ]


def mixture_of(sizes, weights=None, shuffle=True, seed=0, kind=Mixture, **curriculum):
    return kind(sets_of(sizes), weights or [float(size) for size in sizes], shuffle, seed, **curriculum)


def curriculum_of(sizes, weights, function, num_iterations):
    curriculum = {"kind": CurriculumStream, "function": function, "path": "here:f", "num_iterations": num_iterations}
    return mixture_of(sizes, weights, shuffle=False, **curriculum)


def facts(groups):
    return [(g.group_index, g.prompt.text) for g in groups]


def weights_for(data, sizes):
    weights = data.draw(st.lists(st.floats(0, 5), min_size=len(sizes), max_size=len(sizes)))
    return weights if sum(weights) > 1e-3 else [1.0] * len(sizes)


@given(SIZES, st.booleans(), st.integers(0, 5), DRAWS, DRAWS, st.data())
def test_restored_mixture_draws_the_same(sizes, shuffle, seed, before, after, data):
    weights = weights_for(data, sizes)
    mixture, restored = (mixture_of(sizes, weights, shuffle, seed) for _ in range(2))
    drawn = [group for n in before for group in mixture.draw(n)]
    unfinished = sorted(data.draw(st.sets(st.sampled_from(range(len(drawn)))))) if drawn else []
    restored.restore(json.loads(json.dumps(mixture.state(unfinished[::-1]))))
    again = restored.draw(len(unfinished))
    assert facts(again) == [facts(drawn)[i] for i in unfinished]
    for n in after:
        assert facts(restored.draw(n)) == facts(mixture.draw(n))
    assert restored.state() == mixture.state()


@given(SIZES, st.integers(1, 60), st.data())
def test_every_set_gets_its_share_at_any_time(sizes, draws, data):
    weights = weights_for(data, sizes)
    mixture = mixture_of(sizes, weights)
    counts = Counter()
    for n in range(1, draws + 1):
        [group] = mixture.draw(1)
        counts[group.prompt.prompt_set] += 1
        assert group.group_index == n - 1
        for name, weight in zip("abcd", weights, strict=False):
            ahead = counts[name] - n * weight / sum(weights)
            assert -(len(sizes) - 1) - 60 * DOUBLE_ERROR < ahead < 1 + 60 * DOUBLE_ERROR


@given(st.integers(1, 6), st.booleans(), st.integers(0, 5))
def test_a_set_is_drawn_in_the_order_of_its_own_stream(size, shuffle, seed):
    alone = PromptStream(sets_of([size])[0].prompts, shuffle, seed)
    mixture = mixture_of([size, 3], [1.0, 2.0], shuffle, seed)
    texts = [group.prompt.text for group in mixture.draw(30) if group.prompt.prompt_set == "a"]
    assert texts == [group.prompt.text for group in alone.draw(len(texts))]


def test_a_set_without_prompts_gives_its_share_to_the_others():
    mixture = mixture_of([2, 3], [1.0, 1.0], shuffle=False)
    drawn = mixture.draw(4)
    for group in drawn:
        if group.prompt.prompt_set == "a":
            mixture.leave_out(group.group_index)
    assert {group.prompt.prompt_set for group in mixture.draw(6)} == {"b"}
    restored = mixture_of([2, 3], [1.0, 1.0], shuffle=False)
    restored.restore(json.loads(json.dumps(mixture.state())))
    assert {group.prompt.prompt_set for group in restored.draw(6)} == {"b"}
    for group in restored.draw(3):
        restored.leave_out(group.group_index)
    with pytest.raises(NoPromptsLeft, match="all 5 prompts"):
        restored.draw(1)


@given(st.integers(0, 20), st.integers(1, 200))
def test_the_others_keep_their_shares_when_a_set_is_used_up(before, after):
    mixture = mixture_of([50, 50, 2], [2.0, 1.0, 3.0])
    for group in mixture.draw(before + 6):
        if group.prompt.prompt_set == "c":
            mixture.leave_out(group.group_index)
    counts = Counter(group.prompt.prompt_set for group in mixture.draw(after))
    assert counts["c"] == 0
    assert abs(counts["a"] - 2 * after / 3) <= 2, "up to two prompts are owed by the draws before"


def test_without_prompts_only_unfinished_and_named_groups_are_drawn():
    mixture, restored = mixture_of([2, 3], shuffle=False), mixture_of([2, 3], shuffle=False)
    drawn = mixture.draw(9)
    for group in drawn:
        mixture.leave_out(group.group_index)
    restored.restore(mixture.state(unfinished=[1, 4]))
    restored.draw_next([("b", 1)])
    with pytest.raises(NoPromptsLeft) as caught:
        restored.draw(4)
    assert caught.value.left == 3
    assert [group.group_index for group in restored.draw(3)] == [1, 4, len(drawn)]


@pytest.mark.parametrize("other", [[2], [2, 3, 1]])
def test_a_position_in_other_sets_is_refused(other):
    state = mixture_of([2, 3]).state()
    with pytest.raises(ValueError, match="--prompt-mix: the checkpoint"):
        mixture_of(other).restore(state)


def test_positions_of_single_sets_and_of_mixtures_are_told_apart():
    single, mixture = PromptStream([Prompt("x", (1,))], False, 0), mixture_of([2, 3])
    with pytest.raises(
        ValueError,
        match="--prompt-mix: .* without --prompt-mix and --curriculum-path, .*; give .* and --curriculum-path as",
    ):
        mixture.restore(single.state())
    with pytest.raises(
        ValueError,
        match="--prompt-data: .* in the sets of --prompt-mix or --curriculum-path, .*; give .* and --curriculum-path",
    ):
        single.restore(mixture.state())


def test_another_size_of_a_set_is_refused():
    with pytest.raises(ValueError, match="num_prompts"):
        mixture_of([2, 4]).restore(mixture_of([2, 3]).state())


def score(group, reward):
    group.samples = [Sample(group.prompt, group.group_index, 0, [1, 2], reward=reward)]
    return group


def by_iteration(curriculum: Curriculum):
    return {"a": 3.0 - curriculum.iteration, "b": curriculum.iteration}


def worst_first(curriculum: Curriculum):
    return [place for place, known in curriculum.prompts.items() if known.reward < 0.5]


def stream_with(function, sizes=(3, 3), iterations=3):
    return curriculum_of(list(sizes), None, function, iterations)


def test_weights_of_a_curriculum_change_what_is_drawn():
    stream = stream_with(by_iteration, iterations=4)
    drawn = []
    for iteration in range(4):
        stream.start(iteration)
        drawn.append(Counter(group.prompt.prompt_set for group in stream.draw(6)))
    assert drawn[0] == {"a": 6} and drawn[3] == {"b": 6}
    assert drawn[1]["a"] > drawn[1]["b"] > 0 and drawn[2]["b"] > drawn[2]["a"] > 0


def test_named_prompts_are_drawn_next_and_then_the_order_goes_on():
    stream, plain = stream_with(worst_first), mixture_of([3, 3], shuffle=False)
    stream.start(0)
    first = stream.draw(4)
    assert facts(first) == facts(plain.draw(4))
    stream.record(0, [score(group, reward) for group, reward in zip(first, (1.0, 0.0, 0.0, 1.0), strict=True)])
    stream.start(1)
    texts = [group.prompt.text for group in stream.draw(4)]
    assert texts[:2] == [group.prompt.text for group in first[1:3]]
    assert texts[2:] == [group.prompt.text for group in plain.draw(2)]


def test_what_was_named_and_not_drawn_is_forgotten():
    answers = iter([[("a", 2), ("b", 2)], None])
    stream, plain = stream_with(lambda curriculum: next(answers)), mixture_of([3, 3], shuffle=False)
    stream.start(0)
    assert [group.prompt.text for group in stream.draw(1)] == ["a2"]
    stream.start(1)
    assert [g.prompt.text for g in stream.draw(3)] == [g.prompt.text for g in plain.draw(3)]


@given(st.integers(1, 5), st.data())
def test_a_resumed_curriculum_draws_the_same(stop, data):
    """The function is called again for the iteration that a run resumes with, with the same statistics."""
    rewards = data.draw(st.lists(st.floats(0, 1), min_size=24, max_size=24))
    seen = []

    def curriculum(given_now: Curriculum):
        seen.append((given_now.iteration, dict(given_now.prompts), dict(given_now.weights)))
        return worst_first(given_now) if given_now.iteration % 2 else {"a": 1.0 + given_now.iteration, "b": 2.0}

    def run(stream, iterations):
        history = []
        for iteration in iterations:
            stream.start(iteration)
            groups = stream.draw(4)
            history += facts(groups)
            stream.record(iteration, [score(g, rewards[(iteration * 4 + i)]) for i, g in enumerate(groups)])
        return history

    whole = run(stream_with(curriculum), range(6))
    of_whole, seen[:] = list(seen), []
    first, second = stream_with(curriculum), stream_with(curriculum)
    before = run(first, range(stop))
    second.restore(json.loads(json.dumps(first.state())))
    assert before + run(second, range(stop, 6)) == whole
    assert seen == of_whole


def test_weights_that_are_given_to_a_resumed_run_hold():
    before = mixture_of([3, 3], [1.0, 1.0], shuffle=False)
    before.draw(2)
    resumed = mixture_of([3, 3], [0.0, 1.0], shuffle=False)
    resumed.restore(json.loads(json.dumps(before.state())))
    assert resumed.weights == {"a": 0.0, "b": 1.0}
    assert {group.prompt.prompt_set for group in resumed.draw(4)} == {"b"}


@pytest.mark.parametrize(
    ("given_now", "resumes_curriculum", "expected"),
    [(None, True, [2.0, 5.0]), ([1.0, 3.0], True, [1.0, 3.0]), (None, False, [3.0, 3.0])],
)
def test_weights_of_a_curriculum_continue_unless_others_are_given(given_now, resumes_curriculum, expected):
    answers = iter([{"a": 2.0, "b": 5.0}])
    first = stream_with(lambda curriculum: next(answers))
    first.start(0)
    resumed = mixture_of([3, 3], given_now, shuffle=False)
    if resumes_curriculum:
        resumed = curriculum_of([3, 3], given_now, lambda curriculum: None, 3)
    resumed.restore(json.loads(json.dumps(first.state())))
    if resumes_curriculum:
        resumed.start(1)
    assert list(resumed.weights.values()) == expected


def test_what_is_known_of_a_prompt():
    stream = stream_with(lambda curriculum: None)
    stream.start(0)
    groups = stream.draw(2)
    stream.record(0, [score(groups[0], 0.25), groups[1]])
    ((place, known),) = stream.known.items()
    assert place == (groups[0].prompt.prompt_set, 0)
    assert (known.groups, known.reward, known.response_length, known.iteration) == (1, 0.25, 2.0, 0)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ({"a": 1.0}, "returned weights of a; return one of each: a, b"),
        ({"a": -1.0, "b": 1.0}, "are not all finite numbers of at least 0"),
        ({"a": 0.0, "b": 0.0}, "are all 0"),
        ([("c", 0)], "as a prompt"),
        ([("a", 3)], "as a prompt; return .set, position. from 0 on; a has 3, b has 3"),
        ("a", "return weights by set"),
        (7, "return weights by set"),
    ],
)
def test_what_a_curriculum_may_not_return(returned, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        stream_with(lambda curriculum: returned).start(0)
    assert str(caught.value).startswith("--curriculum-path here:f: ")


def test_a_pass_is_complete_when_every_set_has_one():
    mixture = mixture_of([1, 3], [1.0, 1.0], shuffle=False)
    assert [mixture.draw(1) and mixture.epoch for _ in range(8)] == [0, 0, 0, 0, 0, 0, 0, 1]
