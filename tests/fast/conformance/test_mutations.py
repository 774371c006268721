"""The matrix finds every seeded fault, and the loss-mass canary detects those that change a token's weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compare import differences, off_policy, samples_of, wanted
from mutations import MUTATIONS


@pytest.fixture(scope="module")
def conforming(ranks, oracle):
    """Return a function that runs a mutation's case without the fault, and returns the case and the expected result."""
    known = []

    def case_of(mutation):
        right = off_policy(mutation.case, oracle) if mutation.off_policy else mutation.case
        expected = wanted(right, oracle, samples_of(right))
        if right not in known:
            (result,) = ranks.run(right)
            assert differences(result, *expected) == [], "without the fault the case conforms"
            known.append(right)
        return right, expected

    return case_of


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=lambda mutation: mutation.fault)
def test_fault_is_found_and_the_canary_detects_what_the_table_says(ranks, conforming, mutation):
    """One run shows both: the canary's message is noted, and does not end the step."""
    right, expected = conforming(mutation)
    (result,) = ranks.run(replace(right, mutation=mutation.fault, watch=True, notes_canary=True))
    assert ("--loss-canary" in result.canary) is mutation.canary
    if mutation.hidden_by_watching:
        assert differences(result, *expected) == []
        (result,) = ranks.run(replace(right, mutation=mutation.fault))
    assert differences(result, *expected) != []


def test_the_canary_stops_the_run(ranks, conforming):
    mutation = MUTATIONS["gradients are averaged over ranks"]
    right, _ = conforming(mutation)
    assert "--loss-canary" in ranks.run(replace(right, mutation=mutation.fault, watch=True))


def test_there_are_enough_faults():
    assert len(MUTATIONS) >= 15
