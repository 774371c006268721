"""Clip-Cov and KL-Cov: their losses against 2505.22617, and which tokens of a step they choose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tolerance import FEW_ROUNDINGS

from miles.config.explain import explain, without_effect
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.chosen import build_objective
from miles.objective.policy_losses.base import StepTokens
from miles.objective.settings import LossArguments

NUMBERS = st.floats(-4, 4).map(lambda x: float(np.float32(x)))
TOKENS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=40)  # log p, log p_old, A


def step(tokens, seed=0):
    columns = np.array(tokens, np.float64).reshape(-1, 3).T
    return StepTokens(*columns, seed=seed)


def chosen(loss, tokens):
    return build_objective(loss).policy_loss.select_tokens(loss, tokens).tolist()


def covariance(tokens):
    mean_p, mean_a = (sum(token[c] for token in tokens) / len(tokens) for c in (0, 2))
    return [(p - mean_p) * (a - mean_a) for p, _, a in tokens]


@given(TOKENS, st.sampled_from([1e-4, 0.1, 0.5, 1.0]))
def test_kl_cov_takes_the_largest_covariances(tokens, fraction):
    selection = chosen(LossArguments(policy_loss="kl_cov", kl_cov_fraction=fraction), step(tokens))
    if not tokens:
        assert selection == []
        return
    assert sum(selection) == max(1, int(fraction * len(tokens)))
    cov = covariance(tokens)
    taken = [c for c, is_taken in zip(cov, selection, strict=True) if is_taken]
    left = [c for c, is_taken in zip(cov, selection, strict=True) if not is_taken]
    assert not left or min(taken) >= max(left) - 1e-4, "less what is taken for rounding"


@given(st.lists(st.tuples(st.integers(-4, 0), st.integers(-1, 1)), max_size=30), st.integers(0, 2**31))
@pytest.mark.parametrize(
    "flags",
    [
        dict(policy_loss="kl_cov", kl_cov_fraction=0.3),
        dict(policy_loss="clip_cov", clip_cov_fraction=0.3, clip_cov_min=0.0),
    ],
)
def test_rounding_changes_no_choice(flags, tokens, seed):
    """Equal covariances are common: a token of equal probability and reward; and all are 0 if all rewards are equal."""
    loss = LossArguments(**flags)
    rng, offset = np.random.default_rng(seed), seed / 7e9  # no mean is exact
    exact = [(p / 3.0, p / 3.0, a + offset) for p, a in tokens]
    moved = [(p + rng.uniform(-1e-6, 1e-6), old, a * (1 + rng.uniform(-1e-7, 1e-7))) for p, old, a in exact]
    assert chosen(loss, step(exact, seed)) == chosen(loss, step(moved, seed))


@given(TOKENS, st.sampled_from([1e-4, 0.2, 1.0]), st.integers(0, 2**32 - 1))
def test_clip_cov_draws_from_its_range_what_ppo_leaves(tokens, fraction, seed):
    loss = LossArguments(policy_loss="clip_cov", clip_cov_fraction=fraction, clip_cov_min=0.5, clip_cov_max=3.0)
    selection = chosen(loss, step(tokens, seed))
    assert selection == chosen(loss, step(tokens, seed)), "a draw repeats"
    covariances = covariance(tokens) if tokens else []
    assume(all(min(abs(c - 0.5), abs(c - 3.0)) > 1e-4 for c in covariances))
    eligible = [
        0.5 < c < 3.0 and not ((a > 0 and np.exp(p - old) > 1.2) or (a < 0 and np.exp(p - old) < 0.8))
        for c, (p, old, a) in zip(covariances, tokens, strict=True)
    ]
    assert all(e for e, is_taken in zip(eligible, selection, strict=True) if is_taken)
    assert sum(selection) == min(sum(eligible), max(1, int(fraction * len(tokens))))


@given(st.integers(0, 59), st.integers(0, 2**31))
def test_one_token_less_to_draw_from_changes_one_of_the_drawn(place, seed):
    """So a token that rounding moves over a bound does not change the whole draw."""
    loss = LossArguments(policy_loss="clip_cov", clip_cov_fraction=0.2, clip_cov_min=0.1)
    tokens = [(i % 2 - 1.0, i % 2 - 1.0, i % 2 * 2.0 - 1.0) for i in range(60)]  # each may be drawn
    p, _, a = tokens[place]
    before = chosen(loss, step(tokens, seed))
    after = chosen(loss, step([*tokens[:place], (p, p - a, a), *tokens[place + 1 :]], seed))  # this one is clipped
    changes = [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    assert sum(after) == 12 and len(changes) == 2 * before[place] and before[place] == (place in changes)


def test_draws_differ_by_seed():
    tokens = [(float(i % 2), 0.0, float(i % 2)) for i in range(100)]
    loss = LossArguments(policy_loss="clip_cov", clip_cov_fraction=0.1, clip_cov_min=0.0)
    assert len({str(chosen(loss, step(tokens, seed))) for seed in range(5)}) > 1


def kl_cov(p, old, a, selected):
    return (-a * (p - old).exp() + 0.5 * selected * (p - old).abs()).mean()


def kl_cov_kl(p, old, a, selected):
    return (-a * (p - old).exp() + 0.5 * selected * ((p - old).exp() - 1 - (p - old))).mean()


def clip_cov(p, old, a, selected):
    ratio = (p - old).exp()
    return (torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)) * (1 - selected)).mean()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("name", "fields", "formula"),
    [
        ("kl_cov", {"kl_cov_coef": 0.5}, kl_cov),
        ("kl_cov", {"kl_cov_coef": 0.5, "kl_cov_penalty": "kl"}, kl_cov_kl),
        ("clip_cov", {}, clip_cov),
    ],
)
def test_loss_and_gradient(off_policy, gradient_of, name, fields, formula, seed):
    case = off_policy(seed)
    parts = case.micro.selected.double().split(list(case.micro.response_lengths))
    masks = case.micro.loss_mask.split(list(case.micro.response_lengths))
    selected = iter([part[mask != 0] for part, mask in zip(parts, masks, strict=True) if mask.any()])
    expected_loss, expected = case.expected(lambda p, old, a: formula(p, old, a, next(selected)))
    loss, gradient, metrics = gradient_of(LossArguments(policy_loss=name, **fields), case.micro, case.log_probs)
    assert loss == pytest.approx(expected_loss, rel=FEW_ROUNDINGS, abs=FEW_ROUNDINGS)
    torch.testing.assert_close(gradient, expected, rtol=FEW_ROUNDINGS, atol=FEW_ROUNDINGS)
    assert ("pg_clipfrac" in metrics) == (name == "clip_cov")


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=6), st.lists(st.floats(-3, 3), min_size=6, max_size=6))
def test_the_penalty_kl_is_the_papers_on_average(make_micro, gradient_of, old, new):
    """One token per word of the vocabulary, weighted by p_old: the mean of the estimates is the KL of all words."""
    old = torch.tensor(old, dtype=torch.float64).log_softmax(0)
    logits = torch.tensor(new[: len(old)], dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(0)
    kl = (old.exp() * (old - log_probs)).sum()
    kl.backward()

    columns = {"old_log_probs": old.float(), "advantages": torch.zeros(len(old)), "selected": torch.ones(len(old))}
    loss = LossArguments(policy_loss="kl_cov", kl_cov_penalty="kl")
    mean, gradient = 0.0, torch.zeros(len(old), dtype=torch.float64)
    for word, weight in enumerate(old.exp()):
        one = make_micro([[1.0]], **{name: column[word : word + 1] for name, column in columns.items()})
        value, slope, _ = gradient_of(loss, one, [log_probs[word].item()])
        mean += weight.item() * value
        gradient[word] = weight * slope[0]
    assert mean == pytest.approx(kl.item(), rel=FEW_ROUNDINGS, abs=FEW_ROUNDINGS)
    # The chain rule of log_softmax: words that lose probability to others.
    by_logit = gradient - log_probs.exp().detach() * gradient.sum()
    torch.testing.assert_close(by_logit, logits.grad, rtol=FEW_ROUNDINGS, atol=FEW_ROUNDINGS)


def test_clip_cov_scores_the_first_step_too_and_kl_cov_does_not():
    """A second forward pass per step, but kl_cov has nothing to penalize in the first step of an iteration."""
    asks = {n: build_objective(LossArguments(policy_loss=n)).needs.old_log_probs for n in ("kl_cov", "clip_cov", "ppo")}
    assert asks == {"kl_cov": False, "clip_cov": True, "ppo": False}
    assert not build_objective(LossArguments()).selects_tokens
    assert build_objective(LossArguments(policy_loss="kl_cov")).selects_tokens


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--policy-loss kl_cov --kl-cov-fraction 2", "--kl-cov-fraction 2.0: .* 0 to 1"),
        ("--policy-loss kl_cov --kl-cov-penalty k3", "--kl-cov-penalty k3"),
        ("--policy-loss kl_cov --kl-cov-coef 0", "--kl-cov-coef 0.0: .*above 0"),
        ("--policy-loss clip_cov --clip-cov-min 6", "--clip-cov-min 6.0: leaves no covariance below --clip-cov-max 5"),
    ],
)
def test_refused(command, flags, message):
    with pytest.raises(ValueError, match=message):
        validate(parse(f"{command} {flags}".split()))


def test_explained(command):
    kl, clip = (validate(parse(f"{command} --policy-loss {name}".split())) for name in ("kl_cov", "clip_cov"))
    assert "-ρ A + 1 |log ρ| [t in K]" in explain(kl) and "policy_losses/kl_cov.py" in explain(kl)
    kl_of_paper = validate(parse(f"{command} --policy-loss kl_cov --kl-cov-penalty kl --kl-cov-coef 2".split()))
    assert "-ρ A + 2 (ρ - 1 - log ρ) [t in K]" in explain(kl_of_paper)
    assert any("kl_cov" in line for line in without_effect(kl.settings))
    assert "0 for 0.0002 T tokens of the step, at least one" in explain(clip)
