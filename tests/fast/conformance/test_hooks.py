"""Hooks see whole samples: a hook written like a built-in objective has its gradient and metrics in every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import BATCHES, FULL, LAYOUTS, MODES, Case, loss_of, rows_of
from compare import differences, off_policy, samples_of, wanted
from critic_oracle import expected_step, off_policy_with_values
from quick_pairs import quick_pairs

from miles.objective.chosen import build_objective

SPLITS = ["alone, packed", "dp2", "cp2", "cp4, packed", "dp2 x cp2", "dynamic cp, 4 ranks"]
PPO = dict(custom_policy_loss_function_path="custom_hooks:ppo_losses")
SEVERAL = dict(use_tis=True, tis_level="sequence", tis_clip=1.3, use_rs=True, use_opsm=True, get_mismatch_metrics=True)
OTHERS = {  # by name: the built-in objective, and the hook
    "sequence ratios": (dict(policy_loss="gspo"), dict(custom_policy_loss_function_path="custom_hooks.gspo_losses")),
    "sequence weights": (
        dict(use_tis=True, tis_level="sequence", tis_clip=1.3),
        dict(use_tis=True, tis_clip=1.3, custom_tis_function_path="custom_hooks:sequence_weights"),
    ),
    "with corrections": (SEVERAL, dict(**SEVERAL, **PPO)),
    "with a custom reducer": (
        dict(custom_pg_loss_reducer_function_path="custom_reducers:typed"),
        dict(custom_pg_loss_reducer_function_path="custom_reducers:typed", **PPO),
    ),
}
NOT_REPORTED = ("pg_clipfrac", "tis_clipfrac")


def assert_same(ranks, case: Case, hooked: Case, gradients, metrics) -> None:
    (result,) = ranks.run(hooked)
    absent = [name for name in NOT_REPORTED if name not in result.metrics]
    assert differences(result, gradients, {name: x for name, x in metrics.items() if name not in absent}) == []


@pytest.mark.parametrize(("mode", "layout"), quick_pairs(MODES, SPLITS))
def test_token_losses(ranks, oracle, mode, layout):
    """Test with KL, entropy and the canary; the loss mass counts every token once."""
    case = off_policy(Case(BATCHES["masked"], loss_of(mode, **FULL), LAYOUTS[layout], seed=3), oracle)
    hooked = replace(case, loss=loss_of(mode, **FULL, **PPO), watch=True)
    assert_same(ranks, case, hooked, *wanted(case, oracle, samples_of(case)))


@pytest.mark.parametrize(("name", "layout"), quick_pairs(OTHERS, SPLITS))
def test_other_objectives(ranks, oracle, name, layout):
    built_in, hooks = OTHERS[name]
    case = off_policy(Case(BATCHES["uneven"], loss_of("sample_mean", **built_in), LAYOUTS[layout], seed=5), oracle)
    assert_same(
        ranks,
        case,
        replace(case, loss=loss_of("sample_mean", **hooks)),
        *wanted(case, oracle, samples_of(case)),
    )


@pytest.mark.parametrize(("mode", "layout"), quick_pairs(MODES, SPLITS))
def test_a_whole_loss(ranks, oracle, mode, layout):
    case = off_policy(Case(BATCHES["masked"], loss_of(mode, entropy_coef=0.01), LAYOUTS[layout], seed=3), oracle)
    path = dict(loss_type="custom_loss", custom_loss_function_path="custom_hooks:whole_loss")
    gradients, metrics = wanted(case, oracle, samples_of(case))
    (result,) = ranks.run(replace(case, loss=loss_of(mode, entropy_coef=0.01, **path)))
    assert differences(result, gradients, {name: metrics[name] for name in ("loss", "entropy_loss")}) == []


@pytest.mark.parametrize(("mode", "layout"), quick_pairs(["sample_mean", "token_mean"], ["dp2", "cp2", "dp2 x cp2"]))
def test_a_loss_with_four_arguments(ranks, oracle, mode, layout):
    """Also on ranks that have no samples in a micro-batch."""
    case = off_policy(Case(BATCHES["masked"], loss_of(mode, entropy_coef=0.01), LAYOUTS[layout], seed=3), oracle)
    path = dict(loss_type="custom_loss", custom_loss_function_path="custom_hooks:four_argument_loss")
    gradients, metrics = wanted(case, oracle, samples_of(case))
    (result,) = ranks.run(replace(case, loss=loss_of(mode, entropy_coef=0.01, **path)))
    assert differences(result, gradients, {name: metrics[name] for name in ("loss", "entropy_loss")}) == []


@pytest.mark.parametrize("layout", ["alone, packed", "dp2 x cp2"])
def test_what_a_function_makes_of_the_scored_data_is_trained_on(ranks, oracle, layout):
    case = off_policy(Case(BATCHES["masked"], loss_of("sample_mean"), LAYOUTS[layout], seed=3), oracle)
    path = dict(rollout_data_postprocess_path="custom_hooks:twice_the_advantage")
    gradients, metrics = wanted(case, oracle, samples_of(case))
    (result,) = ranks.run(replace(case, loss=loss_of("sample_mean", **path)))
    doubled = {name: 2 * gradient for name, gradient in gradients.items()}
    metrics |= {name: 2 * metrics[name] for name in ("loss", "pg_loss")}
    assert differences(result, doubled, metrics) == []


@pytest.mark.parametrize("layout", ["alone, packed", "dp2 x cp2"])
def test_advantages_of_samples(ranks, oracle, layout):
    case = Case(BATCHES["uneven"], loss_of("prompt_mean"), LAYOUTS[layout])
    loss = loss_of("prompt_mean", custom_advantage_function_path="custom_hooks:group_advantages")
    assert_same(ranks, case, replace(case, loss=loss), *wanted(case, oracle, samples_of(case)))


@pytest.mark.parametrize("layout", ["alone, packed", "dp2 x cp2"])
def test_advantages_of_tokens(ranks, oracle, layout):
    returns = dict(
        advantage_estimator="reinforce_plus_plus", gamma=0.9, normalize_advantages=True, kl_coef=0.3, kl_loss_type="k3"
    )
    case = Case(BATCHES["compacted"], loss_of("sample_mean", **returns), LAYOUTS[layout])
    case = off_policy_with_values(case, oracle)
    expected = expected_step(case, oracle)
    loss = loss_of("sample_mean", custom_advantage_function_path="custom_hooks.discounted", **returns)
    assert_same(ranks, case, replace(case, loss=loss), expected.gradients, expected.metrics)


@pytest.mark.parametrize(("path", "skips"), [("custom_hooks:ppo_losses", True), ("custom_hooks:gspo_losses", False)])
def test_nothing_is_skipped_unless_a_function_allows_it(ranks, oracle, path, skips):
    """The step is the same, whether samples are skipped or not. gspo_losses does not say whether they may be."""
    loss = loss_of("sample_mean", custom_policy_loss_function_path=path, eps_clip=0.2)
    assert build_objective(loss).samples_with_gradient([0.0]) == [not skips]
    plain = loss_of("sample_mean", policy_loss=None if skips else "gspo", eps_clip=0.2)
    case = off_policy(Case(BATCHES["uneven"], plain, LAYOUTS["cp2"], equal_rewards=True), oracle)
    assert any(row.advantage == 0 for row in rows_of(case))
    assert_same(ranks, case, replace(case, loss=loss), *wanted(case, oracle, samples_of(case)))
