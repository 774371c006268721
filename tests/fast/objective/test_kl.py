"""Estimators of the KL: expected values and gradients, enumerated exactly over a small vocabulary."""

from dataclasses import replace

import pytest
import torch
from tolerance import DOUBLE_ERROR

from miles.base.flags import Errors
from miles.objective.kl import approximate_kl, check_kl
from miles.objective.settings import LossArguments

VOCABULARY = 7


def distributions():
    """Return logits of the policy with a graph, and log-probs of an older policy and of the reference, in float64."""
    draw = torch.Generator().manual_seed(3)
    logits, old, reference = (torch.randn(VOCABULARY, generator=draw, dtype=torch.float64) for _ in range(3))
    return logits.requires_grad_(), (logits.detach() + 0.3 * old).log_softmax(0), reference.log_softmax(0)


def close(actual, expected):
    return torch.allclose(actual, expected, rtol=0, atol=DOUBLE_ERROR)


def gradient(value, logits):
    (result,) = torch.autograd.grad(value, logits)
    return result


def exact_gradient(logits, reference):
    """Differentiate KL(policy || reference) itself."""
    log_p = logits.log_softmax(0)
    return gradient((log_p.exp() * (log_p - reference)).sum(), logits)


@pytest.mark.parametrize(
    ("estimator", "is_of"),
    [("k1", "0"), ("k2", "KL"), ("k3", "reverse"), ("low_var_kl", "reverse"), ("k1+", "KL"), ("k3+", "KL")],
)
def test_expected_gradient_on_policy(estimator, is_of):
    """Tokens come from the policy, whose probabilities carry no graph, as sampling has none."""
    logits, _, reference = distributions()
    log_p = logits.log_softmax(0)
    actual = gradient((log_p.detach().exp() * approximate_kl(log_p - reference, estimator)).sum(), logits)
    reverse = gradient((reference.exp() * (reference - logits.log_softmax(0))).sum(), logits)
    gradients = {"0": torch.zeros_like(reverse), "KL": exact_gradient(logits, reference), "reverse": reverse}
    assert [of for of, exact in gradients.items() if close(actual, exact)] == [is_of]


@pytest.mark.parametrize("estimator", ["k1", "k3", "low_var_kl"])
def test_the_ratio_makes_value_and_gradient_right_off_policy(estimator):
    """Tokens come from an older policy; ``--use-unbiased-kl`` weights each estimate by the ratio."""
    logits, old, reference = distributions()
    log_p = logits.log_softmax(0)
    estimate = (old.exp() * (log_p - old).exp() * approximate_kl(log_p - reference, estimator)).sum()
    exact = (log_p.exp() * (log_p - reference)).sum()
    assert close(estimate, exact)
    assert close(gradient(estimate, logits), exact_gradient(logits, reference))
    plain = gradient((old.exp() * approximate_kl(logits.log_softmax(0) - reference, estimator)).sum(), logits)
    assert not torch.allclose(plain, exact_gradient(logits, reference), atol=1e-3)


def test_the_ratio_makes_k2_its_own_mean():
    """With ``--use-unbiased-kl`` k2 is not the KL: it has the gradient of the mean of d² / 2."""
    logits, old, reference = distributions()
    log_p = logits.log_softmax(0)
    estimate = gradient((old.exp() * (log_p - old).exp() * approximate_kl(log_p - reference, "k2")).sum(), logits)
    log_p = logits.log_softmax(0)
    mean = gradient((log_p.exp() * (log_p - reference).square() / 2).sum(), logits)
    assert close(estimate, mean)
    assert not torch.allclose(estimate, exact_gradient(logits, reference), atol=1e-3)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_values_are_those_without_the_plus(estimator):
    log_ratio = torch.linspace(-5, 5, 41, dtype=torch.float64)
    assert torch.equal(approximate_kl(log_ratio, estimator + "+"), approximate_kl(log_ratio, estimator))


IN_LOSS = LossArguments(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")


@pytest.mark.parametrize(
    ("loss", "flags"),
    [
        (replace(IN_LOSS, use_unbiased_kl=True), []),
        (replace(IN_LOSS, kl_loss_type="k3+"), []),
        (replace(IN_LOSS, kl_loss_type="k3+", use_unbiased_kl=True), ["--kl-loss-type k3+"]),
        (LossArguments(kl_coef=0.1, kl_loss_type="k1+"), ["--kl-loss-type k1+"]),
    ],
)
def test_combinations_without_a_meaning_are_refused(loss, flags):
    errors = Errors()
    check_kl(loss, errors)
    assert [message.split(":")[0].removesuffix(" True") for message in errors.messages] == flags
