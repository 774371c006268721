"""GPG's advantages and policy loss against 2504.02546."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DOUBLE_ERROR

from miles.config.explain import explain
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.chosen import build_objective
from miles.objective.settings import LossArguments

GPG = LossArguments(advantage_estimator="gpg")


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=5), min_size=1, max_size=5))
def test_the_mean_over_groups_is_one_over_those_that_differ(advantages_of, groups):
    valid = [group for group in groups if len(set(group)) > 1]
    alpha = len(groups) / len(valid) if valid else 0.0
    expected = [pytest.approx([alpha * (r - statistics.mean(g)) for r in g], abs=DOUBLE_ERROR) for g in groups]
    assert advantages_of(GPG, groups) == expected


@given(st.lists(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=5), min_size=1, max_size=5))
def test_verls_scale_counts_the_rewards_that_are_not_0(advantages_of, groups):
    rewards = [reward for group in groups for reward in group]
    alpha = len(rewards) / max(sum(reward != 0.0 for reward in rewards), 1)
    expected = [pytest.approx([alpha * (r - statistics.mean(g)) for r in g], abs=DOUBLE_ERROR) for g in groups]
    assert advantages_of(LossArguments(advantage_estimator="gpg", gpg_scale="rewards"), groups) == expected


def test_the_two_scales_differ(advantages_of):
    groups = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    assert advantages_of(GPG, groups)[0][0] == 2 * 0.75, "one group of two differs"
    of_verl = LossArguments(advantage_estimator="gpg", gpg_scale="rewards")
    assert advantages_of(of_verl, groups)[0][0] == 8 / 5 * 0.75, "five rewards of eight are not 0"


def test_equal_groups_beside_it_do_not_weaken_a_group(advantages_of):
    """The mean over all groups of a gradient that is linear in the advantages."""
    alone = advantages_of(GPG, [[1.0, 0.0]])[0]
    beside = advantages_of(GPG, [[1.0, 0.0], [1.0, 1.0], [0.0]])[0]
    assert [a / 3 for a in beside] == pytest.approx(alone)


def test_its_policy_loss_is_the_policy_gradient(make_micro, gradient_of):
    micro = make_micro([[1, 1, 0], [1]], advantages=torch.tensor([0.5, 0.5, torch.nan, -2.0]))
    log_probs = [-1.0, -3.0, torch.nan, -0.5]
    off_policy = make_micro(
        [[1, 1, 0], [1]], advantages=micro.advantages, old_log_probs=torch.tensor([-9.0, -3.0, torch.nan, -0.1])
    )
    for batch in (micro, off_policy):
        loss, gradient, metrics = gradient_of(GPG, batch, log_probs)
        assert loss == pytest.approx(((0.5 * 1 + 0.5 * 3) / 2 + -2.0 * 0.5) / 2)
        torch.testing.assert_close(gradient, torch.tensor([-0.125, -0.125, 0.0, 1.0]).double())
        assert "pg_clipfrac" not in metrics
    assert build_objective(LossArguments(policy_loss="gpg")).samples_with_gradient([0.0, 1.0]) == [False, True]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--advantage-estimator gpg --n-samples-per-prompt 1", "with --advantage-estimator gpg every advantage is 0"),
        ("--advantage-estimator gpg --gpg-scale samples", "--gpg-scale samples"),
    ],
)
def test_refused(command, flags, message):
    with pytest.raises(ValueError, match=message):
        validate(parse(f"{command} {flags}".split()))


def test_explained(command):
    text = explain(validate(parse(f"{command} --advantage-estimator gpg".split())))
    assert "A = B / (B - M) (reward - mean of its prompt group)" in text and "l_it = -A log p" in text
    text = explain(validate(parse(f"{command} --advantage-estimator gpg --gpg-scale rewards".split())))
    assert "A = N / max(K, 1) (reward - mean of its prompt group)" in text
