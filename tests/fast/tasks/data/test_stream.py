import hashlib
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.tasks.data.stream import FINGERPRINTED, NoPromptsLeft, PromptStream
from miles.types.sample import Prompt

sizes = st.integers(1, 7)
seeds = st.integers(0, 5)
draws = st.lists(st.integers(0, 9), max_size=6)


def stream_of(size, shuffle=True, seed=0):
    return PromptStream([Prompt(str(i), (i,)) for i in range(size)], shuffle, seed)


def facts(groups):
    return [(g.group_index, g.prompt.text) for g in groups]


@given(sizes, st.booleans(), seeds, draws, draws)
def test_restored_stream_draws_the_same(size, shuffle, seed, before, after):
    stream, restored = stream_of(size, shuffle, seed), stream_of(size, shuffle, seed)
    for n in before:
        stream.draw(n)
    restored.restore(json.loads(json.dumps(stream.state())))
    for n in after:
        assert restored.epoch == stream.epoch
        assert facts(restored.draw(n)) == facts(stream.draw(n))
    assert restored.state() == stream.state()


@given(sizes, st.booleans(), seeds, draws, st.data())
def test_unfinished_prompts_are_drawn_again_first(size, shuffle, seed, before, data):
    stream, restored = stream_of(size, shuffle, seed), stream_of(size, shuffle, seed)
    drawn = [group for n in before for group in stream.draw(n)]
    unfinished = sorted(data.draw(st.sets(st.sampled_from(range(len(drawn)))))) if drawn else []
    restored.restore(json.loads(json.dumps(stream.state(unfinished[::-1]))))
    half = len(unfinished) // 2
    again = restored.draw(half)
    twice = stream_of(size, shuffle, seed)
    twice.restore(restored.state())
    again += twice.draw(len(unfinished) - half + 3)
    assert facts(again) == [facts(drawn)[i] for i in unfinished] + facts(stream.draw(3))


@given(sizes, st.booleans(), seeds, draws)
def test_how_draws_are_split_changes_nothing(size, shuffle, seed, ns):
    stream, at_once = stream_of(size, shuffle, seed), stream_of(size, shuffle, seed)
    drawn = [group for n in ns for group in stream.draw(n)]
    assert facts(drawn) == facts(at_once.draw(sum(ns)))
    assert [g.group_index for g in drawn] == list(range(len(drawn)))
    assert all(g.samples == [] for g in drawn)


@given(sizes, st.booleans(), seeds, st.integers(1, 4))
def test_every_epoch_draws_every_prompt_once(size, shuffle, seed, passes):
    stream = stream_of(size, shuffle, seed)
    for epoch in range(passes):
        assert Counter(text for _, text in facts(stream.draw(size))) == Counter(map(str, range(size)))
        assert stream.epoch == epoch


def test_shuffling_differs_by_epoch_and_seed():
    stream, other = stream_of(50), stream_of(50, seed=1)
    first, second, third = ([g.prompt.text for g in s.draw(50)] for s in (stream, stream, other))
    assert len({tuple(order) for order in (first, second, third)}) == 3
    assert [g.prompt.text for g in stream_of(50, shuffle=False).draw(50)] == [str(i) for i in range(50)]


@pytest.mark.parametrize(
    ("size", "seed", "epoch", "first", "hashed"),
    [
        (7, 0, 0, [0, 6, 1, 4, 5, 3, 2], "60478bcacf617ea5"),
        (1000, 42, 1, [680, 318, 819, 459, 172, 942, 293], "bb4b64e599c1aca6"),
        (100_003, 5, 3, [79177, 83659, 10123, 48351, 27208, 48092, 9429], "cae9f5e95a5026ca"),
    ],
)
def test_the_order_of_a_seed_is_that_of_earlier_versions(size, seed, epoch, first, hashed):
    """Positions in checkpoints rely on it. The values come from the version that kept all prompts in memory."""
    stream = PromptStream([Prompt(str(n), (n,)) for n in range(size)], shuffle=True, seed=seed)
    stream.restore(stream.state() | {"epoch": epoch})
    order = [int(group.prompt.text) for group in stream.draw(size)]
    assert order[:7] == first
    assert hashlib.blake2b(json.dumps(order).encode(), digest_size=8).hexdigest() == hashed


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        (stream_of(4), "--prompt-data: .* num_prompts 5, this run has num_prompts 4"),
        (stream_of(5, shuffle=False), "--rollout-shuffle: .*"),
        (stream_of(5, seed=9), "--rollout-seed: .* seed 0, this run has seed 9"),
    ],
)
def test_state_of_another_order_is_refused(other, fault):
    with pytest.raises(ValueError, match=fault):
        other.restore(stream_of(5).state())


def rows(*texts, rendered="{}", name="", label=None):
    prompts = [Prompt(rendered.format(t), (1,), label, input=t, prompt_set=name) for t in texts]
    return PromptStream(prompts, shuffle=True, seed=0)


@pytest.mark.parametrize(
    ("other", "where"),
    [
        (rows("a", "b", "d"), "--prompt-data"),
        (rows("a", "b", "c", label="7"), "--prompt-data"),
        (rows("c", "b", "a", name="math"), "the prompt set math"),
        (rows([{"role": "user", "content": b"x"}], "b", "c"), "--prompt-data"),
    ],
)
def test_other_rows_that_are_as_many_are_continued_with_a_note(caplog, other, where):
    other.restore(rows("a", "b", "c").state())
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{where}: the rows differ from the saved run's, ")
    assert other.state()["next_group_index"] == 0


@pytest.mark.parametrize("same", [rows("a", "b", "c"), rows("a", "b", "c", rendered="<user>{}", name="math")])
def test_the_same_rows_are_continued_without_a_note_also_with_another_template(caplog, same):
    same.restore(rows("a", "b", "c").state())
    earlier = rows("x", "y", "z").state()
    del earlier["fingerprint"]
    same.restore(earlier)
    assert not caplog.records


def test_the_fingerprint_of_many_rows_reads_few():
    class Rows(list):
        read = 0

        def __getitem__(self, key):
            result = super().__getitem__(key)
            self.read += len(result)
            return result

    many = Rows([Prompt(str(n), (1,)) for n in range(100_001)])
    stream = PromptStream(many, shuffle=False, seed=0)
    assert stream.state()["fingerprint"] == stream.state()["fingerprint"]
    assert FINGERPRINTED / 2 < many.read <= FINGERPRINTED


def test_a_position_in_the_users_own_source_is_refused():
    state = {"source": {"next": 4}, "next_group_index": 4, "unfinished": []}
    with pytest.raises(ValueError, match="--prompt-data: .* rows of --data-source-path"):
        stream_of(5).restore(state)


def test_no_prompts():
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptStream([], shuffle=False, seed=0)


@given(st.integers(2, 7), st.booleans(), seeds, st.data())
def test_a_prompt_that_is_left_out_is_not_drawn_again(size, shuffle, seed, data):
    """Also after a restart; the others are drawn once a pass, and an index is never used twice."""
    stream, restored = stream_of(size, shuffle, seed), stream_of(size, shuffle, seed)
    first = stream.draw(size)
    out = data.draw(st.lists(st.sampled_from(first), min_size=1, max_size=size - 1, unique_by=lambda g: g.group_index))
    for group in out:
        stream.leave_out(group.group_index)
    restored.restore(json.loads(json.dumps(stream.state())))
    left = size - len(out)
    drawn = stream.draw(3 * left)
    assert facts(drawn) == facts(restored.draw(3 * left))
    assert set(Counter(g.prompt.text for g in drawn).values()) == {3}
    assert not {g.prompt.text for g in drawn} & {g.prompt.text for g in out}
    indices = [g.group_index for g in (*first, *drawn)]
    assert indices == sorted(set(indices))


def test_without_prompts_only_unfinished_groups_are_drawn_again():
    stream = stream_of(2)
    for group in stream.draw(2):
        stream.leave_out(group.group_index)
    with pytest.raises(NoPromptsLeft, match="--max-prompt-pass-rate: all 2 prompts have reached it"):
        stream.draw(1)
    restored = stream_of(2)
    restored.restore(stream.state(unfinished=[1]))
    with pytest.raises(NoPromptsLeft) as caught:
        restored.draw(2)
    assert caught.value.left == 1
    assert [group.group_index for group in restored.draw(1)] == [1]
