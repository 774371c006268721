"""The matrix finds every seeded fault, and the loss-mass canary detects those that change a token's weight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from compare import differences, off_policy, samples_of, wanted
from mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=lambda mutation: mutation.fault)
def test_fault_is_found(ranks, oracle, mutation):
    right = off_policy(mutation.case, oracle) if mutation.off_policy else mutation.case
    expected = wanted(right, oracle, samples_of(right))
    (result,) = ranks.run(right)
    assert differences(result, *expected) == [], "without the fault the case conforms"
    (result,) = ranks.run(replace(right, mutation=mutation.fault))
    assert differences(result, *expected) != []


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=lambda mutation: mutation.fault)
def test_the_canary_detects_what_the_table_says(ranks, oracle, mutation):
    right = off_policy(mutation.case, oracle) if mutation.off_policy else mutation.case
    found = ranks.run(replace(right, mutation=mutation.fault, watch=True))
    assert isinstance(found, str) is mutation.canary
    assert not mutation.canary or "--loss-canary" in found


def test_there_are_enough_faults():
    assert len(MUTATIONS) >= 15


def test_the_docs_state_what_the_canary_detects():
    page = (Path(__file__).parents[3] / "docs" / "loss-aggregation.md").read_text()
    for mutation in MUTATIONS.values():
        assert f"| {mutation.fault} | {'yes' if mutation.canary else 'no'} |" in page
