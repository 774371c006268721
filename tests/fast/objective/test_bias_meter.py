"""The bias meter's figures: identities that must hold, the committed results, and random steps."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
from tolerance import FEW_ROUNDINGS, digits

FOLDER = Path(__file__).parents[3] / "examples" / "reproduce" / "bias_meter"
sys.path.insert(0, str(FOLDER))

import measure  # noqa: E402
import task  # noqa: E402


@pytest.fixture(scope="module")
def meter():
    return measure.Meter(task.Steps.all(), task.POLICY, task.POLICY, task.POLICY)


@pytest.fixture(scope="module")
def engine(meter):
    return measure.Meter(meter.steps, task.POLICY, task.POLICY, task.SAMPLER)


@pytest.fixture(scope="module")
def committed():
    with (FOLDER / "results.csv").open(encoding="utf-8") as file:
        return {(r["kind"], r["estimator"], r["aggregation"], r["correction"]): r for r in csv.DictReader(file)}


def test_all_steps_together_are_certain(meter):
    assert meter.steps.probabilities(task.SAMPLER).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("estimator", ["rloo", "grpo, no std", "raw reward"])
def test_with_a_constant_divisor_it_is_the_gradient_of_the_mean_reward(meter, committed, estimator):
    names = (estimator, "constant", "none")
    row = meter.measure("on-policy", names, measure.loss_of(measure.ESTIMATOR_ROWS[estimator]), with_curl=True)
    own = 1 - 1 / task.GROUP if estimator == "grpo, no std" else 1.0
    assert row.objective == "mean reward" and row.scale == pytest.approx(own / task.PLACES, rel=FEW_ROUNDINGS)
    assert row.curl == pytest.approx(0.0, abs=FEW_ROUNDINGS)
    assert committed["on-policy", *names]["noise"] == f"{row.noise:.4g}"


def test_only_the_ratio_of_the_sequence_corrects_for_another_sampler(engine, committed):
    for correction, more in measure.CORRECTIONS.items():
        row = engine.measure(
            "", ("rloo", "constant", correction), measure.loss_of(dict(advantage_estimator="rloo"), **more)
        )
        assert (row.objective == "mean reward") is (correction == "tis, sequence")
        stored = committed["another sampler", "rloo", "constant", correction]
        assert float(stored["bias"]) == pytest.approx(row.bias, rel=digits(4), abs=measure.EXACT)


def test_a_policy_loss_that_chooses_tokens_is_given_its_choice(meter, committed):
    later = measure.Meter(meter.steps, task.POLICY, task.SAMPLER, task.SAMPLER)
    loss = measure.loss_of(dict(advantage_estimator="rloo"), policy_loss="kl_cov")
    row = later.measure("a later step", ("kl_cov", "constant", "none"), loss)
    stored = committed["a later step", "kl_cov", "constant", "none"]
    assert float(stored["bias"]) == pytest.approx(row.bias, rel=digits(4))
    assert stored["bias"] != committed["a later step", "cispo", "constant", "none"]["bias"], "the plain ratio"


def test_normalized_weights_have_a_mean_of_one_in_each_step(engine):
    """Weights of different steps are divided by different means, from every token of the step."""
    loss = measure.loss_of(
        dict(advantage_estimator="rloo"), **measure.CORRECTIONS["tis, token, at most 1.2, normalized"]
    )
    ratios = np.exp(
        engine.steps.column(task.log_probs(task.POLICY)) - engine.steps.column(task.log_probs(task.SAMPLER))
    )
    step = engine.steps.tokens[0]
    wanted = np.bincount(step, ratios.clip(max=1.2)) / np.bincount(step)
    means = measure.mean_weights(engine.steps, loss, task.POLICY, task.SAMPLER)
    assert means == pytest.approx(wanted, rel=FEW_ROUNDINGS) and means.max() - means.min() > 0.1


def test_off_policy_masking_drops_something_in_a_later_step(meter, committed):
    later = measure.Meter(meter.steps, task.POLICY, task.SAMPLER, task.SAMPLER)
    loss = measure.loss_of(dict(advantage_estimator="rloo"), policy_loss=measure.PLAIN, **measure.OPSM)
    row = later.measure("a later step", (measure.PLAIN, "constant", "opsm"), loss)
    stored = committed["a later step", measure.PLAIN, "constant", "opsm"]
    assert float(stored["bias"]) == pytest.approx(row.bias, rel=digits(4))
    assert stored["bias"] != committed["a later step", measure.PLAIN, "constant", "none"]["bias"]


def test_random_steps_have_the_expected_mean(engine):
    """The z-scores of six parameters, with a fixed seed."""
    loss = measure.loss_of(dict(advantage_estimator="rloo"), "sample_mean")
    drawn = task.Steps.drawn(np.random.default_rng(1), task.POLICY, 1500)
    gradients = []
    for steps in (engine.steps, drawn):
        advantages, denominators = measure.advantages_of(steps, loss, task.POLICY), measure.denominators_of(steps, loss)
        weights = measure.token_weights(steps, loss, advantages, denominators, *[task.POLICY] * 3)
        gradients.append(steps.gradients(weights, task.POLICY))
    exact = np.tensordot(engine.steps.probabilities(task.POLICY), gradients[0], 1)
    z = (gradients[1].mean(0) - exact) / (gradients[1].std(0, ddof=1) / np.sqrt(len(drawn.draws)))
    assert np.abs(z).max() < 4


def test_the_committed_results_are_complete(committed):
    modes, estimators = len(measure.MODES), len(measure.ESTIMATOR_ROWS)
    rows = estimators * modes * (1 + len(measure.CORRECTIONS)) + (len(measure.POLICY_LOSSES) + 1) * modes  # 1 is opsm
    assert len(committed) == rows, "run examples/reproduce/bias_meter/run.sh and commit results.csv and bias.png"
