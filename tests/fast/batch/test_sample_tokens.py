"""A micro-batch gives back the tokens of its samples, whichever way they are laid out and cut."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from miles.batch.collate import collate
from miles.compat.losses import sample_tokens
from miles.types.groups import ContextGroup

LENGTHS = [(3, 2), (3, 5), (1, 7), (4, 1)]
CPU = torch.device("cpu")


@pytest.fixture
def batch(make_batch):
    """Samples; two of them share their prompt."""
    made = make_batch(LENGTHS)
    made.tokens[1][:3] = made.tokens[0][:3]
    return made


@pytest.mark.parametrize(
    "layout", [{}, {"share_prefixes": False}, {"row_multiple": 8}], ids=["shared", "packed", "rows"]
)
def test_on_one_rank(batch, layout):
    sequences = sample_tokens(collate(batch, [2, 0, 1], CPU, **layout))
    assert [tokens.tolist() for tokens in sequences] == [batch.tokens[i].tolist() for i in (2, 0, 1)]
    assert sample_tokens(collate(batch, [], CPU, **layout)) == []


@pytest.mark.parametrize("size", [2, 3])
def test_on_ranks_that_share_the_samples(batch, size):
    """The test concatenates the parts that the ranks would gather."""
    parts = [collate(batch, range(4), CPU, ContextGroup(size, rank)) for rank in range(size)]
    gathered = torch.cat([part.input_ids for part in parts])
    for part in parts:
        context = SimpleNamespace(size=size, gather=lambda mine: gathered)
        sequences = sample_tokens(replace(part, context=context))
        assert all(np.array_equal(a, b) for a, b in zip(sequences, batch.tokens, strict=True))
