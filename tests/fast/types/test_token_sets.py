"""Sets of tokens are restored from their compact form, whatever their size."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.types.replay import TokenSets, extended
from miles.types.support import EXCLUDED, Support


@st.composite
def sets_of_tokens(draw, vocab_size=None):
    vocab_size = vocab_size or draw(st.sampled_from([1, 5, 64, 200]))
    one = st.none() | st.sets(st.integers(0, vocab_size - 1), min_size=1).map(sorted)
    few = st.none() | st.sets(st.integers(0, vocab_size - 1), min_size=1, max_size=6).map(sorted)
    return vocab_size, draw(st.lists(one | few, max_size=8))


def plain(sets: TokenSets):
    whole = list(range(sets.vocab_size))
    return [whole if one is None else one.tolist() for one in sets.sets()]


def expected(vocab_size, given_sets):
    return [list(range(vocab_size)) if one is None else one for one in given_sets]


@given(sets_of_tokens(), st.data())
def test_sets_are_restored_taken_and_joined(drawn, data):
    vocab_size, given_sets = drawn
    sets = TokenSets.of(vocab_size, [one if one is None else one[::-1] for one in given_sets])
    sets.check()
    assert plain(sets) == expected(vocab_size, given_sets) and len(sets) == len(given_sets)
    indices = data.draw(st.lists(st.integers(0, max(len(given_sets) - 1, 0)), max_size=8 if given_sets else 0))
    taken = sets.take(np.asarray(indices, np.int64))
    taken.check()
    assert plain(taken) == [plain(sets)[i] for i in indices]
    _, others = data.draw(sets_of_tokens(vocab_size))
    joined = TokenSets.joined([sets, TokenSets.of(vocab_size, others)])
    assert joined == TokenSets.of(vocab_size, [*given_sets, *others])
    assert (joined == sets) == (not others)


@given(sets_of_tokens(), st.data())
def test_membership(drawn, data):
    vocab_size, given_sets = drawn
    tokens = [data.draw(st.integers(-1, vocab_size)) for _ in given_sets]
    membership = TokenSets.of(vocab_size, given_sets).contain(tokens)
    wanted = expected(vocab_size, given_sets)
    assert membership.tolist() == [token in one for token, one in zip(tokens, wanted, strict=True)]


@given(sets_of_tokens(), st.data())
def test_logits_outside_a_set_are_excluded_on_every_part_of_the_vocabulary(drawn, data):
    vocab_size, given_sets = drawn
    start = data.draw(st.integers(0, len(given_sets)))
    first = data.draw(st.integers(0, vocab_size - 1))
    width = data.draw(st.integers(1, vocab_size + 9))  # beyond the vocabulary: the padding of an embedding
    support = Support.of(TokenSets.of(vocab_size, given_sets), torch.device("cpu"))
    rows = given_sets[start : start + 3]
    logits = support.exclude_(torch.zeros(len(rows), width), slice(start, start + 3), first)
    for row, one in zip(logits.tolist(), rows, strict=True):
        mask = [one is None or len(one) == vocab_size or first + column in one for column in range(width)]
        assert row == [0.0 if k else pytest.approx(EXCLUDED) for k in mask]


def test_a_set_takes_at_most_a_bit_per_token_of_the_vocabulary():
    vocab_size, count = 150_000, 40
    rng = np.random.default_rng(0)
    for size in (1, 20, 4_687, 4_688, 100_000, vocab_size):
        sets = TokenSets.of(vocab_size, [rng.choice(vocab_size, size, replace=False) for _ in range(count)])
        taken = sum(column.nbytes for column in (sets.sizes, sets.ids, sets.bits)) / count
        assert taken <= 4 + min(4 * size, vocab_size // 8), size
    assert taken == 4  # the whole vocabulary


def test_tokens_of_a_tool_have_the_whole_vocabulary():
    drawn = TokenSets.of(9, [[1], [2, 3]])
    assert extended(None, 4, None, 2) is None
    grown = extended(extended(None, 1, drawn, 2), 3, None, 1)
    assert [one if one is None else one.tolist() for one in grown.sets()] == [None, [1], [2, 3], None]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"sizes": [2, 0, -1]}, "empty"),
        ({"sizes": [2, 65, -1]}, "larger"),
        ({"sizes": [1, 40, -1]}, "sizes of the sets"),
        ({"ids": [3, 64]}, "outside the vocabulary"),
        ({"ids": [7, 3]}, "ascending"),
        ({"sizes": [2, 39, -1]}, "bits of a set"),
    ],
)
def test_columns_that_do_not_belong_together_are_refused(changes, fault):
    sets = TokenSets.of(64, [[3, 7], list(range(40)), None])
    columns = {name: getattr(sets, name) for name in ("sizes", "ids", "bits")}
    changed = {name: np.asarray(value, columns[name].dtype) for name, value in changes.items()}
    with pytest.raises(ValueError, match=fault):
        TokenSets(64, **(columns | changed)).check()
