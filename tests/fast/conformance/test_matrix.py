"""The gradient and metrics of a step do not depend on how it is split: modes x batches x layouts.

Fast tests have each value at least once, slow tests the whole product.
"""

from __future__ import annotations

import string
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import BATCHES, FULL, LAYOUTS, MODES, TEMPERATURE, VOCABULARY, Case, loss_of, rows_of, without_loss_tokens
from compare import differences, off_policy, samples_of, wanted
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from oracle import chosen_experts, load_oracle, token_scores
from quick_pairs import quick_pairs
from tiny_llama import SHAPE
from tolerance import RELATIVE_ERROR
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from examples.small_task import write_small_vision_model

AT_THREE = ("dp3", "dp3, padded by budget", "cp3", "cp3, packed", "dynamic cp, 3 ranks")
EVERY_LAYOUT = [  # 3 divides neither the width nor the vocabulary of the model
    pytest.param(layout, id=name, marks=pytest.mark.slow if name in AT_THREE else ())
    for name, layout in LAYOUTS.items()
]


DRAWN = settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
CORRECTIONS = {
    "tis": dict(use_tis=True, tis_clip=1.3, tis_clip_low=0.8),
    "tis of sequences": dict(use_tis=True, tis_clip=1.3, tis_level="sequence"),
    "icepop": dict(use_tis=True, tis_mode="icepop", tis_clip=1.4, tis_clip_low=0.7),
    "token rejection": dict(use_rs=True, rs_lower_bound=0.7, rs_upper_bound=1.4),
    "sequence rejection and tis": dict(
        use_rs=True, rs_level="geometric", rs_lower_bound=0.95, rs_upper_bound=1.05, use_tis=True
    ),
    "veto": dict(use_rs=True, rs_lower_bound=0.3, rs_upper_bound=2.0, rs_veto_threshold=0.4),
    "normalized tis": dict(use_tis=True, tis_clip=1.1, tis_batch_normalize=True),
    "normalized tis of sequences": dict(
        use_tis=True, tis_clip=1.3, tis_clip_low=0.6, tis_level="sequence", tis_batch_normalize=True
    ),
    "normalized icepop and rejection": dict(
        use_tis=True, tis_mode="icepop", tis_clip=1.2, tis_clip_low=0.8, tis_batch_normalize=True, use_rs=True
    ),
    "the engine's log-probs as the old ones": dict(use_rollout_logprobs=True, eps_clip=0.1),
    "mismatch metrics of the engine's log-probs": dict(use_rollout_logprobs=True, get_mismatch_metrics=True),
    "mismatch metrics": dict(get_mismatch_metrics=True),
    "kl_cov of the engine's log-probs": dict(
        policy_loss="kl_cov", kl_cov_fraction=0.2, kl_cov_coef=0.5, use_rollout_logprobs=True
    ),
    "clip_cov of the engine's log-probs": dict(
        policy_loss="clip_cov", clip_cov_fraction=1.0, clip_cov_min=0.05, clip_cov_max=1.0, use_rollout_logprobs=True
    ),
    "gspo": dict(advantage_estimator="gspo", eps_clip=0.05),
    "opsm": dict(use_opsm=True, opsm_delta=0.01),
    "top entropy": dict(top_entropy_quantile=0.4),
    "unbiased kl": dict(use_kl_loss=True, kl_loss_coef=0.05, kl_loss_type="k3", use_unbiased_kl=True),
    "tis of geometric means": dict(use_tis=True, tis_clip=1.02, tis_clip_low=0.98, tis_level="geometric"),
    "sequence rejection": dict(use_rs=True, rs_level="sequence", rs_lower_bound=0.7, rs_upper_bound=1.4),
}


def assert_conforms(case: Case, ranks, oracle) -> None:
    (result,) = ranks.run(case)
    assert differences(result, *wanted(case, oracle, samples_of(case))) == []


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_every_mode_and_every_batch_at_every_layout(ranks, oracle, layout):
    """Test off-policy with KL and entropy terms, on even, uneven, masked, compacted and tiny batches.

    The five batches take turns at the four modes, which begin with another one at the next layout. One more case is
    on-policy and shuffled.
    """
    turn = list(LAYOUTS).index(layout.name)
    for number, name in enumerate(BATCHES, start=turn):
        _conforms_off_policy(ranks, oracle, MODES[number % len(MODES)], layout, name)
    _conforms_shuffled(ranks, oracle, MODES[turn % len(MODES)], layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda of: of.name)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_on_every_batch_at_every_layout(ranks, oracle, mode, layout):
    for name in BATCHES:
        _conforms_off_policy(ranks, oracle, mode, layout, name)
    _conforms_shuffled(ranks, oracle, mode, layout)


def _conforms_shuffled(ranks, oracle, mode, layout) -> None:
    assert_conforms(Case(BATCHES["compacted"], loss_of(mode), layout, shuffled=True, watch=True), ranks, oracle)


def _conforms_off_policy(ranks, oracle, mode, layout, name) -> None:
    assert_conforms(
        off_policy(Case(BATCHES[name], loss_of(mode, **FULL), layout, seed=len(name)), oracle), ranks, oracle
    )


MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=13).map(tuple)
ROLLOUTS = st.lists(MASKS, min_size=1, max_size=3).map(tuple)
SPECS = st.lists(st.lists(ROLLOUTS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=4).map(tuple)


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_drawn_batches(ranks, oracle, layout):
    _conform_drawn(ranks, oracle, layout, DRAWN)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda of: of.name)
def test_many_drawn_batches(ranks, oracle, layout):
    _conform_drawn(ranks, oracle, layout, settings(DRAWN, max_examples=20))


def _conform_drawn(ranks, oracle, layout, drawn) -> None:
    @drawn
    @example(spec=((((1, 0),),),), mode="sample_mean", seed=46, shuffled=False)  # one token: errors do not average out
    @given(SPECS, st.sampled_from(MODES), st.integers(0, 1000), st.booleans())
    def conforms(spec, mode, seed, shuffled):
        case = Case(spec, loss_of(mode), layout, seed, shuffled=shuffled, watch=True)
        assert_conforms(case, ranks, oracle)

    conforms()


@pytest.mark.parametrize("layout", ["alone, packed", "dp2 x cp2"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_corrections_change_only_the_numerator(ranks, oracle, correction, layout):
    """Engine and trainer log-probs differ; weights, rejection and sequence ratios are equal in every layout.

    A correction has one of four modes and one of two batches at each layout; the next one has the others.
    """
    turn = list(CORRECTIONS).index(correction) + (layout == "alone, packed")
    mode, batch = MODES[turn % len(MODES)], ("compacted", "uneven")[turn // len(MODES) % 2]
    _conforms_with_correction(ranks, oracle, correction, layout, mode, batch)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["alone, packed", "dp2 x cp2", "dynamic cp, 4 ranks"])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_corrections_change_only_the_numerator_in_every_mode(ranks, oracle, correction, layout):
    for mode in MODES:
        for batch in ("compacted", "uneven"):
            _conforms_with_correction(ranks, oracle, correction, layout, mode, batch)


def _conforms_with_correction(ranks, oracle, correction, layout, mode, batch) -> None:
    case = Case(BATCHES[batch], loss_of(mode, **CORRECTIONS[correction]), LAYOUTS[layout], watch=True)
    assert_conforms(off_policy(case, oracle), ranks, oracle)


@pytest.mark.parametrize(
    "layout",
    ["alone, packed", "alone, padded", "dp2 x cp2, packed"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("dp2", "cp2", "cp4, packed", "dp2, padded by budget", "dynamic cp, 4 ranks")
    ],
)
def test_the_support_of_truncated_sampling_is_replayed(ranks, oracle, layout):
    """Log-probs, entropy, KL and ratios are over the set of each token, in every layout."""
    for batch, loss in (
        ("uneven", loss_of("sample_mean", **FULL)),
        ("compacted", loss_of("token_mean", use_tis=True, tis_clip=1.3, **FULL)),
    ):
        case = off_policy(Case(BATCHES[batch], loss, LAYOUTS[layout], restricted=True, watch=True), oracle)
        assert_conforms(case, ranks, oracle)
    assert_conforms(Case(BATCHES["masked"], loss_of("prompt_mean"), LAYOUTS[layout], restricted=True), ranks, oracle)


@pytest.mark.parametrize(
    ("losses", "layout"),
    quick_pairs(["built in", "hook"], ["dp2 x cp2", "cp2", "alone, packed", "alone, padded", "dynamic cp, 4 ranks"], 2),
)
def test_the_report_gets_what_the_loss_has_read_of_the_tokens(ranks, oracle, layout, losses):
    """Whole responses, each once, however the step is split."""
    hook = dict(custom_policy_loss_function_path="custom_hooks:ppo_losses") if losses == "hook" else {}
    loss = loss_of("sample_mean", use_tis=True, tis_clip=1.3, tis_clip_low=0.8, **hook)
    case = off_policy(Case(BATCHES["compacted"], loss, LAYOUTS[layout], records_tokens=True), oracle)
    (result,) = ranks.run(case)
    samples = samples_of(case)
    assert sorted(result.tokens) == list(range(len(samples)))
    for position, sample in enumerate(samples):
        record, mask = result.tokens[position], np.asarray(sample.mask) != 0
        with torch.no_grad():
            current = token_scores(oracle, sample.tokens, len(sample.mask), TEMPERATURE)[0].numpy()
        old, engine = np.asarray(sample.old_log_probs), np.asarray(sample.rollout_log_probs)
        want = {
            "advantages": np.full(len(old), sample.advantage),
            "log_probs": old,
            "ratios": np.exp(current - old),
            "token_weights": np.exp(old - engine).clip(0.8, 1.3),
        }
        for name, column in want.items():
            assert getattr(record, name)[mask] == pytest.approx(column[mask], rel=RELATIVE_ERROR, abs=RELATIVE_ERROR), (
                name
            )


@pytest.mark.parametrize(
    ("batch", "layout"),
    quick_pairs(["uneven", "masked", "compacted"], ["alone, packed", "dp2 x cp2", "dynamic cp, 4 ranks"]),
)
def test_weights_by_length_are_the_same_in_every_layout(ranks, oracle, layout, batch):
    case = Case(BATCHES[batch], loss_of("delta_l"), LAYOUTS[layout], watch=True)
    assert_conforms(off_policy(case, oracle), ranks, oracle)


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_samples_without_advantage_are_only_scored(ranks, oracle, layout):
    """They have no backward pass, and the results are as if they had. Layouts take turns at the modes."""
    mode = MODES[list(LAYOUTS).index(layout.name) % len(MODES)]
    _conforms_with_samples_without_advantage(ranks, oracle, mode, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda of: of.name)
def test_samples_without_advantage_are_only_scored_in_every_mode(ranks, oracle, layout):
    for mode in MODES:
        _conforms_with_samples_without_advantage(ranks, oracle, mode, layout)


def _conforms_with_samples_without_advantage(ranks, oracle, mode, layout) -> None:
    case = Case(BATCHES["uneven"], loss_of(mode), layout, equal_rewards=True)
    assert any(row.advantage == 0 for row in rows_of(case)) and any(row.advantage for row in rows_of(case))
    assert_conforms(off_policy(case, oracle), ranks, oracle)


@pytest.mark.parametrize(
    ("batch", "layout"),
    quick_pairs(
        ["uneven", "compacted"],
        ["alone, packed", "alone, padded", "cp2", "cp4, packed", "dp2 x cp2", "dynamic cp, 4 ranks"],
    ),
)
def test_rows_too_long_for_their_scores(ranks, oracle, batch, layout):
    """Test the fused attention, with queries for the last of their keys."""
    case = Case(BATCHES[batch], loss_of("sample_mean"), LAYOUTS[layout], long_rows=True, watch=True)
    assert_conforms(case, ranks, oracle)


SIGMOID = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    n_shared_experts=1,
)
LATENT = SIGMOID | dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=6
)


@pytest.fixture(scope="module", params=[("glm4_moe", SIGMOID), ("deepseek_v3", LATENT)], ids=lambda kind: kind[0])
def sigmoid_model(request, ranks) -> tuple[str, torch.nn.Module]:
    """Return the name of a model with sigmoid routing in the ranks' folder, and its oracle."""
    kind, fields = request.param
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **(SHAPE | {"vocab_size": VOCABULARY} | dict(initializer_range=0.15) | fields))
    model = AutoModelForCausalLM.from_config(config)
    model.model.layers[1].mlp.gate.e_score_correction_bias.normal_()
    model.save_pretrained(ranks.folder / kind)
    oracle = AutoModelForCausalLM.from_pretrained(
        ranks.folder / kind, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
    )
    return kind, oracle.train()


@pytest.mark.parametrize(("long_rows", "layout"), quick_pairs([False, True], ["alone, packed", "cp2"]))
def test_sigmoid_routing_and_latent_attention(ranks, sigmoid_model, layout, long_rows):
    """Rows of latent attention are short and long; values are narrower than keys."""
    name, oracle = sigmoid_model
    case = Case(BATCHES["compacted"], loss_of("sample_mean"), LAYOUTS[layout], long_rows=long_rows, model=name)
    assert_conforms(case, ranks, oracle)


SOFTMAX = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
ROUTED = {
    "softmax": ("qwen3_moe", SOFTMAX | {"norm_topk_prob": False}),
    "softmax, normalized": ("qwen3_moe", SOFTMAX | {"norm_topk_prob": True}),
    "sigmoid": ("deepseek_v3", LATENT | {"routed_scaling_factor": 1.7}),
}


@pytest.fixture(scope="module", params=ROUTED)
def routed_model(request, ranks) -> tuple[str, torch.nn.Module]:
    """Return the name of a model with experts in the ranks' folder, and its oracle."""
    kind, fields = ROUTED[request.param]
    torch.manual_seed(8)
    shape = SHAPE | {"vocab_size": VOCABULARY, "initializer_range": 0.15}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(shape | fields))).save_pretrained(
        ranks.folder / request.param
    )
    oracle = AutoModelForCausalLM.from_pretrained(
        ranks.folder / request.param, dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
    )
    return request.param, oracle.train()


@pytest.mark.parametrize(
    "layout",
    ["alone, packed", "cp2"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("alone, padded", "dp2 x cp2", "dynamic cp, 4 ranks")],
)
def test_the_experts_of_the_engine_are_replayed(ranks, routed_model, layout):
    """Their weights are the router's own, so the gradient reaches it. Prompts with other experts are not shared."""
    name, oracle = routed_model
    case = Case(BATCHES["compacted"], loss_of("sample_mean", **FULL), LAYOUTS[layout], model=name, routing=(2, 4, 2))
    assert_conforms(off_policy(case, oracle), ranks, oracle)
    case = Case(BATCHES["uneven"], loss_of("token_mean"), LAYOUTS[layout], model=name, routing=(2, 4, 2), watch=True)
    assert_conforms(case, ranks, oracle)
    own = [replace(sample, experts=None) for sample in samples_of(case)]
    assert differences(ranks.run(case)[0], *wanted(case, oracle, own)) != []


@pytest.mark.parametrize("layout", ["alone, packed", pytest.param("dp2 x cp2", marks=pytest.mark.slow)])
def test_the_experts_of_the_old_log_probs_are_replayed(ranks, routed_model, layout):
    """Also in a second pass, when the routers would choose others."""
    name, oracle = routed_model
    spec = (*BATCHES["uneven"][1:2], *BATCHES["even"], *BATCHES["uneven"][1:2])
    loss = loss_of("sample_mean")
    case = Case(spec, loss, LAYOUTS[layout], trajectories_per_step=4, passes=2, model=name, records_routing=True)
    samples = [replace(s, experts=chosen_experts(oracle, s.tokens)) for s in samples_of(case)]
    results = ranks.run(case)
    check_steps(case, results, samples, oracle)
    initial = {name: p.detach().clone() for name, p in oracle.named_parameters()}
    with torch.no_grad():
        for parameter_name, parameter in oracle.named_parameters():
            parameter.copy_(torch.from_numpy(results[-1].weights[parameter_name]))
        changed = any((chosen_experts(oracle, s.tokens) != s.experts).any() for s in samples)
        for parameter_name, parameter in oracle.named_parameters():
            parameter.copy_(initial[parameter_name])
    assert changed, "the routers choose others by the last step"


@pytest.mark.parametrize(
    ("form", "layout"),
    quick_pairs(["typed", "positional"], ["dp2 x cp2", "cp2", "alone, packed", "dp2", "dynamic cp, 4 ranks"], 2),
)
def test_custom_reducers_see_whole_samples(ranks, oracle, form, layout):
    loss = loss_of("sample_mean", custom_pg_loss_reducer_function_path=f"custom_reducers:{form}")
    for batch in ("uneven", "masked"):
        assert_conforms(off_policy(Case(BATCHES[batch], loss, LAYOUTS[layout]), oracle), ranks, oracle)


@pytest.mark.parametrize(("mode", "layout"), quick_pairs(MODES, ["alone, packed", "dp2", "cp2", "dynamic cp, 4 ranks"]))
def test_supervised_fine_tuning_shares_the_path(ranks, oracle, mode, layout):
    case = Case(BATCHES["masked"], loss_of(mode, loss_type="sft_loss"), LAYOUTS[layout], watch=True)
    assert_conforms(case, ranks, oracle)


@pytest.mark.parametrize(
    ("mode", "layout"), quick_pairs(MODES, ["alone, packed", "dp2", "dynamic cp, 4 ranks", "dp2 x cp2"])
)
def test_several_steps_per_iteration(ranks, oracle, mode, layout):
    """Each step has its own denominators, and old log-probs of the weights at the start of the iteration."""
    spec = (*BATCHES["uneven"][1:2], *BATCHES["even"], *BATCHES["uneven"][1:2])
    case = Case(spec, loss_of(mode), LAYOUTS[layout], trajectories_per_step=4, watch=True)
    results = ranks.run(case)
    assert len(results) == 2
    check_steps(case, results, samples_of(case), oracle)


@pytest.mark.parametrize(("policy_loss", "layout"), quick_pairs(["ppo", "kl_cov"], ["alone, packed", "dp2 x cp2"]))
def test_a_second_pass_has_the_old_log_probs_of_the_first(ranks, oracle, policy_loss, layout):
    """Also in the steps that were on-policy, and with weights that have moved."""
    fields = BY_COVARIANCE.get(policy_loss, {})
    spec = (*BATCHES["uneven"][1:2], *BATCHES["even"], *BATCHES["uneven"][1:2])
    loss = loss_of("sample_mean", **fields)
    case = Case(spec, loss, LAYOUTS[layout], trajectories_per_step=4, passes=2, watch=True)
    results = ranks.run(case)
    assert len(results) == 4
    check_steps(case, results, samples_of(case), oracle)


BY_COVARIANCE = {
    "kl_cov": dict(policy_loss="kl_cov", kl_cov_fraction=0.2, kl_cov_coef=0.5),
    "kl_cov of the paper": dict(policy_loss="kl_cov", kl_cov_fraction=0.2, kl_cov_coef=0.5, kl_cov_penalty="kl"),
    "clip_cov": dict(policy_loss="clip_cov", clip_cov_fraction=1.0, clip_cov_min=0.05, clip_cov_max=1.0),
}


@pytest.mark.parametrize(
    ("policy_loss", "layout"),
    quick_pairs(BY_COVARIANCE, ["alone, packed", "dp2", "dp2 x cp2", "dynamic cp, 4 ranks"], 3),
)
def test_tokens_are_chosen_from_the_whole_step(ranks, oracle, policy_loss, layout):
    """Not from a micro-batch or a rank; by the current log-probs, also in the second step."""
    spec = (*BATCHES["uneven"][1:2], *BATCHES["even"], *BATCHES["uneven"][1:2])
    loss = loss_of("prompt_mean", **BY_COVARIANCE[policy_loss])
    case = Case(spec, loss, LAYOUTS[layout], trajectories_per_step=4, watch=True)
    results = ranks.run(case)
    assert len(results) == 2
    check_steps(case, results, samples_of(case), oracle)


def check_steps(case, results, samples, oracle) -> None:
    """Compare every step with an oracle that has its weights, and the first weights for the old log-probs."""
    initial = {name: p.detach().clone() for name, p in oracle.named_parameters()}
    with torch.no_grad():
        old = [token_scores(oracle, s.tokens, len(s.mask), TEMPERATURE, experts=s.experts)[0].tolist() for s in samples]
    size = case.trajectories_per_step
    try:
        for number, result in enumerate(results):
            with torch.no_grad():
                for name, parameter in oracle.named_parameters():
                    parameter.copy_(torch.from_numpy(result.weights[name]))
            part = [
                replace(s, old_log_probs=o) if number else s
                for s, o in zip(samples, old, strict=True)
                if s.rollout // size == number % (len(results) // case.passes)
            ]
            assert differences(result, *wanted(case, oracle, part)) == [], f"step {number}"
            moved = any(abs(result.weights[n] - w.numpy()).max() > 1e-4 for n, w in initial.items())
            assert moved == bool(number), "the weights move between the steps"
    finally:
        with torch.no_grad():
            for name, parameter in oracle.named_parameters():
                parameter.copy_(initial[name])


@pytest.fixture(scope="module")
def vision_model(ranks) -> torch.nn.Module:
    """Write a model with a vision tower in the ranks' folder, and return its oracle."""
    folder, characters = ranks.folder / "vision", string.printable[: VOCABULARY - 5]
    write_small_vision_model(folder, 7, hidden=32, characters=characters, deviation=0.15)
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").train()


@pytest.mark.parametrize(
    "layout",
    ["alone, packed"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("alone, padded", "dp2, packed", "dp3", "dp4")],
)
def test_every_mode_with_images(ranks, vision_model, layout):
    """Prompts have one image, three or none, in one micro-batch."""
    for mode, batch in zip(MODES, ("uneven", "masked", "compacted", "even"), strict=True):
        case = Case(BATCHES[batch], loss_of(mode, **FULL), LAYOUTS[layout], model="vision", images=True)
        case = off_policy(case, vision_model)
        assert_conforms(case, ranks, vision_model)
    (result,) = ranks.run(case)
    samples = samples_of(case)
    other = replace(samples[0], images=samples[0].images | {"pixel_values": -samples[0].images["pixel_values"]})
    assert differences(result, *wanted(case, vision_model, [other, *samples[1:]])) != [], "another image is noticed"


@pytest.mark.parametrize("layout", ["alone", "dp2, packed", pytest.param("dp2 x cp2", marks=pytest.mark.slow)])
def test_tied_embeddings(ranks, layout):
    """The gradients of head and embedding add up in one parameter."""
    model = load_oracle(str(ranks.folder / "tied"))
    case = off_policy(Case(BATCHES["uneven"], loss_of("prompt_mean", **FULL), LAYOUTS[layout], model="tied"), model)
    assert_conforms(case, ranks, model)


@pytest.mark.parametrize(
    ("mode", "layout"), quick_pairs(MODES, ["alone", "dp2, packed", "dp2 x cp2", "dynamic cp, 2 ranks"])
)
def test_a_step_without_a_token_is_skipped(ranks, mode, layout):
    spec = without_loss_tokens(BATCHES["uneven"])
    (result,) = ranks.run(Case(spec, loss_of(mode), LAYOUTS[layout], watch=True))
    assert result.metrics["skipped_steps"] == 1 and result.metrics["loss_mass"] == 0
    assert all(not g.any() for g in result.gradients.values())
