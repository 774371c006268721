"""The user's own functions: their forms, found by their signature, what they are given, and the errors of others."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from miles.config.explain import explain
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.aggregation import get_pg_loss_reducer
from miles.objective.chosen import build_objective
from miles.objective.estimators.base import SampleRewards
from miles.objective.hooks import ADVANTAGES, check_hooks
from miles.objective.loss_types.policy_loss import policy_loss_function
from miles.objective.output import PolicyScores
from miles.objective.settings import LossArguments
from miles.objective.token_advantages import SampleTokens, token_advantages

REDUCERS = """
import torch

def first_token_only(inputs):
    weights = torch.cat([torch.eye(1, n)[0] for n in inputs.response_lengths]) * inputs.loss_mask
    assert [len(m) for m in inputs.loss_masks] == list(inputs.response_lengths)
    return lambda losses: torch.dot(losses, weights / inputs.num_trajectories)

def sample_means(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    assert [t - r for t, r in zip(total_lengths, response_lengths)] == [2] * len(response_lengths)
    def reduce(losses):
        parts = zip(losses.split(response_lengths), loss_masks)
        return sum((x * m).sum() / (1 if calculate_per_token_loss else m.sum().clamp(min=1)) for x, m in parts)
    return reduce

def two_arguments(a, b):
    return torch.sum

def no_reducer(inputs):
    return 3

def vector(inputs):
    return lambda losses: losses
"""


@pytest.fixture
def custom(tmp_path, monkeypatch):
    """Settings that name a function of ``REDUCERS``, in a module only this test can see."""
    module = f"reducers_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(REDUCERS)
    monkeypatch.syspath_prepend(tmp_path)

    def settings(name: str, **fields) -> LossArguments:
        return LossArguments(custom_pg_loss_reducer_function_path=f"{module}.{name}", **fields)

    return settings


def test_the_users_own_reducer_comes_first(make_micro, custom):
    micro = make_micro([[1, 1], [1, 0, 1]], num_trajectories=4)
    losses = torch.arange(1.0, 6.0, requires_grad=True)
    value = get_pg_loss_reducer(custom("first_token_only"), micro)(losses)
    value.backward()
    assert value.item() == pytest.approx((1 + 3) / 4)
    assert losses.grad is not None and losses.grad.tolist() == [0.25, 0, 0.25, 0, 0]


@pytest.mark.parametrize("per_token", [False, True])
def test_the_four_argument_form_is_divided_by_the_steps_count(make_micro, custom, per_token):
    micro = make_micro([[1, 1], [1, 0, 1]], num_trajectories=4, num_loss_tokens=10)
    losses = torch.arange(1.0, 6.0)
    mine = get_pg_loss_reducer(custom("sample_means", calculate_per_token_loss=per_token), micro)(losses)
    ours = get_pg_loss_reducer(LossArguments(calculate_per_token_loss=per_token), micro)(losses)
    assert mine.item() == pytest.approx(ours.item())


def test_an_empty_micro_batch_is_zero_and_has_a_graph(make_micro, custom):
    losses = torch.zeros(0, requires_grad=True)
    value = get_pg_loss_reducer(custom("first_token_only"), make_micro([], total_lengths=(1,)))(losses)
    value.backward()
    assert value.item() == 0.0 and losses.grad is not None


@pytest.mark.parametrize(
    ("name", "message"),
    [("two_arguments", "signature is"), ("no_reducer", "returned int"), ("vector", "shape"), ("absent", "no function")],
)
def test_wrong_functions_are_named(make_micro, custom, name, message):
    with pytest.raises(
        ValueError, match=f"--custom-pg-loss-reducer-function-path .*{name}.*{message}|{message}.*{name}"
    ):
        get_pg_loss_reducer(custom(name), make_micro([[1, 1]]))(torch.ones(2))


HOOKS = """
import re
from pathlib import Path

import numpy as np
import torch

def halved(samples):
    return [reward / 2 for reward in samples.rewards]

def too_few(samples):
    return [0.0]

def not_finite(samples):
    return [float("nan") for _ in samples.rewards]

def reversed_rewards(trajectories):
    return [t.rewards[::-1] + len(t.values) for t in trajectories]

def too_short(trajectories):
    return [t.rewards[:-1] for t in trajectories]

def neither(rewards):
    return rewards

def reinforce(inputs):
    return -inputs.advantages * inputs.log_probs

def silent(inputs):
    return -inputs.advantages * inputs.log_probs

reinforce.zero_advantage_has_gradient = False

def a_sum(inputs):
    return inputs.log_probs.sum()

def a_number(inputs):
    return 1.0

def two(inputs, more):
    return None

def whole(inputs):
    return inputs.reduce(-inputs.log_probs), {"mine": inputs.mean(inputs.entropy)}

whole.metrics = ("mine",)

def undeclared(inputs):
    return inputs.reduce(-inputs.log_probs), {"mine": inputs.mean(inputs.entropy)}

def ones(inputs):
    return torch.ones_like(inputs.old_log_probs) * 0.5
"""


@pytest.fixture
def hook(tmp_path, monkeypatch):
    """The path of a function of ``HOOKS``."""
    (tmp_path / f"hooks_{tmp_path.name}.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name, sign=":": f"hooks_{tmp_path.name}{sign}{name}"


def policy_loss(loss, micro, log_probs):
    return policy_loss_function(build_objective(loss), micro, log_probs, None)


@pytest.mark.parametrize("sign", [":", "."])
def test_advantages_of_samples_are_what_the_function_returns(hook, sign):
    loss = LossArguments(custom_advantage_function_path=hook("halved", sign))
    check_hooks(loss, None)
    assert ADVANTAGES.phase(hook("halved")) == 1 and not build_objective(loss).estimates_by_token
    objective = build_objective(loss)
    assert objective.sample_advantages(SampleRewards([1.0, -3.0], [0, 0], [0, 1])) == [0.5, -1.5]
    assert objective.samples_with_gradient([0.0, 0.5]) == [False, True]


def test_advantages_of_tokens_are_what_the_function_returns(hook):
    """The estimator still places the reward and asks for a critic; whitening and masks are ours."""
    loss = LossArguments(advantage_estimator="ppo", custom_advantage_function_path=hook("reversed_rewards"))
    objective = build_objective(loss)
    assert ADVANTAGES.phase(hook("reversed_rewards")) == 2 and objective.estimates_by_token and objective.needs.values
    mask, values = np.array([1, 0, 1], np.float32), np.ones(3, np.float32)
    result = token_advantages(objective, [SampleTokens(0, 5.0, mask, values)])
    assert result.advantages[0].tolist() == [7.0, 0.0, 2.0]
    assert result.returns is not None and result.returns[0].tolist() == [8.0, 0.0, 3.0]
    assert objective.samples_with_gradient([0.0]) == [True]


def test_the_optimal_token_baseline_follows_a_function_of_phase_1_only(hook):
    """Phase 2 is the baseline after a function of phase 1; one of phase 2 replaces it and needs no squared probs."""
    chosen = dict(advantage_estimator="optimal_token_baseline")
    mask, norms = np.ones(2, np.float32), (np.array([0.5, 0.25]), np.array([0.125, 1.0]))

    def estimate(function, rewards):
        fields = chosen if function is None else chosen | dict(custom_advantage_function_path=hook(function))
        objective = build_objective(LossArguments(**fields))
        samples = [
            SampleTokens(i, reward, mask, group_index=0, score_norm=norm)
            for i, (reward, norm) in enumerate(zip(rewards, norms, strict=True))
        ]
        columns = token_advantages(objective, samples).advantages
        return [column.tolist() for column in columns], objective.advantages_need

    baseline, needs = estimate(None, [1.0, -3.0])
    assert needs.sum_squared_probs and baseline[0] != [1.0, 1.0]
    assert estimate("halved", [1.0, -3.0]) == (baseline, needs)
    assert build_objective(LossArguments(**chosen)).needs.sum_squared_probs
    columns, needs = estimate("reversed_rewards", [1.0, -3.0])
    assert columns == [[1.0, 0.0], [-3.0, 0.0]]
    assert needs.old_log_probs and not needs.sum_squared_probs


@pytest.mark.parametrize("name", ["too_few", "not_finite"])
def test_wrong_advantages_of_samples_are_refused(hook, name):
    objective = build_objective(LossArguments(custom_advantage_function_path=hook(name)))
    with pytest.raises(ValueError, match=f"--custom-advantage-function-path .*{name}.*one finite number per sample"):
        objective.sample_advantages(SampleRewards([1.0, 0.0], [0, 0], [0, 1]))


def test_wrong_advantages_of_tokens_are_refused(hook):
    objective = build_objective(LossArguments(custom_advantage_function_path=hook("too_short")))
    with pytest.raises(ValueError, match="--custom-advantage-function-path .*too_short.*per loss token"):
        token_advantages(objective, [SampleTokens(0, 5.0, np.ones(3, np.float32))])


def test_token_losses_are_what_the_function_returns_and_masked_numbers_are_not_shown(make_micro, hook):
    nan = float("nan")
    micro = make_micro([[1, 0], [1, 1]], advantages=torch.tensor([1.0, nan, 2.0, -1.0]))
    log_probs = torch.tensor([-1.0, nan, -2.0, -3.0], requires_grad=True)
    output = policy_loss(LossArguments(custom_policy_loss_function_path=hook("reinforce")), micro, log_probs)
    output.loss.backward()
    assert output.loss.item() == pytest.approx((1.0 + (4.0 - 3.0) / 2) / 2)
    assert log_probs.grad is not None and log_probs.grad.tolist() == [-0.5, 0.0, -0.5, 0.25]
    assert "pg_clipfrac" not in output.metrics


def test_a_micro_batch_without_samples_is_not_shown_to_a_function(make_micro, hook):
    micro, log_probs = make_micro([], total_lengths=(1,)), torch.zeros(0, requires_grad=True)
    for loss in (
        LossArguments(custom_policy_loss_function_path=hook("a_sum")),
        LossArguments(use_tis=True, custom_tis_function_path=hook("a_number")),
        LossArguments(loss_type="custom_loss", custom_loss_function_path=hook("whole")),
    ):
        output = build_objective(loss).language_model_loss(micro, PolicyScores(log_probs, torch.zeros(0)))
        output.loss.backward()
        assert output.loss.item() == 0.0 and log_probs.grad is not None
    assert set(output.metrics) == {"loss", "mine"}


def test_a_whole_loss_has_the_reducers_of_the_run(make_micro, hook):
    path = hook("whole")
    loss = LossArguments(loss_type="custom_loss", custom_loss_function_path=path, loss_aggregation="prompt_mean")
    micro = make_micro([[1, 1], [1, 0]], sample_denoms=torch.tensor([4.0, 4.0]))
    log_probs, entropy = torch.tensor([-1.0, -2.0, -3.0, float("nan")], requires_grad=True), torch.ones(4)
    canary = torch.zeros((), requires_grad=True)
    output = build_objective(loss).language_model_loss(micro, PolicyScores(log_probs, entropy, canary))
    output.loss.backward()
    assert output.loss.item() == pytest.approx((3.0 + 3.0) / 8) and output.metrics["mine"].item() == 1.0
    assert log_probs.grad is not None and log_probs.grad.tolist() == [-0.125, -0.125, -0.125, 0.0]
    assert canary.grad is not None and canary.grad.item() == 0.0, "what its weights add up to is not known"


def test_importance_weights_are_what_the_function_returns(make_micro, hook):
    micro, log_probs = make_micro([[1, 1]]), torch.tensor([-1.0, -2.0], requires_grad=True)
    plain = policy_loss(LossArguments(), micro, log_probs)
    halved = policy_loss(LossArguments(use_tis=True, custom_tis_function_path=hook("ones")), micro, log_probs)
    assert halved.loss.item() == pytest.approx(0.5 * plain.loss.item()) and halved.metrics["tis"].item() == 0.5


@pytest.mark.parametrize(
    ("name", "has_gradient"), [("reinforce", False), ("silent", True)], ids=["says no", "states nothing"]
)
def test_nothing_is_skipped_until_a_function_says_no(hook, name, has_gradient):
    for loss in (
        LossArguments(custom_policy_loss_function_path=hook(name)),
        LossArguments(loss_type="custom_loss", custom_loss_function_path=hook(name)),
    ):
        assert build_objective(loss).samples_with_gradient([0.0, 1.0]) == [has_gradient, True]


WRONG = [
    (dict(custom_advantage_function_path="neither"), "named samples .* or trajectories"),
    (dict(custom_policy_loss_function_path="two"), "must take one PolicyLossInputs"),
    (dict(custom_policy_loss_function_path="absent"), "no function absent"),
    (dict(loss_type="custom_loss", custom_loss_function_path="two"), "must take one LossInputs"),
    (dict(use_tis=True, custom_tis_function_path="two"), "must take one ImportanceInputs"),
    (dict(use_opsm=True, custom_advantage_function_path="reversed_rewards"), "--use-opsm: .*one for each token"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_start_up_names_a_function_that_cannot_be_called(hook, fields, message):
    flags = {name: hook(value) if name.endswith("path") else value for name, value in fields.items()}
    with pytest.raises(ValueError, match=message):
        check_hooks(LossArguments(**flags), None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(custom_policy_loss_function_path="a_sum"), "--custom-policy-loss-function-path .*shape \\(\\); return"),
        (dict(custom_policy_loss_function_path="a_number"), "--custom-policy-loss-function-path .*float; return"),
        (dict(loss_type="custom_loss", custom_loss_function_path="a_number"), "--custom-loss-function-path .*float"),
        (dict(loss_type="custom_loss", custom_loss_function_path="undeclared"), "declares \\[\\]; declare"),
        (dict(use_tis=True, custom_tis_function_path="a_number"), "--custom-tis-function-path .*float; return"),
    ],
)
def test_wrong_results_are_named(make_micro, hook, fields, message):
    flags = {name: hook(value) if name.endswith("path") else value for name, value in fields.items()}
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    objective = build_objective(LossArguments(**flags))
    with pytest.raises(ValueError, match=message):
        objective.language_model_loss(make_micro([[1, 1]]), PolicyScores(log_probs, torch.ones(2)))


COMMAND = (
    "--hf-checkpoint some/model --prompt-data reasoning_gym:products --rm-type last_number --num-rollout 2 "
    "--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 8"
)
CUSTOM_LOSS = "--loss-type custom_loss --custom-loss-function-path mine:loss"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loss-type custom_loss", "--loss-type custom_loss: needs the function .*add --custom-loss-function-path"),
        (
            "--custom-loss-function-path mine:loss",
            "--custom-loss-function-path mine:loss: is no part of --loss-type policy_loss; use --loss-type custom_loss",
        ),
        (
            "--custom-policy-loss-function-path mine:loss --policy-loss gspo",
            "--policy-loss gspo: names a second policy loss",
        ),
        (f"{CUSTOM_LOSS} --custom-policy-loss-function-path mine:loss", "is no part of --loss-type custom_loss"),
        (f"{CUSTOM_LOSS} --use-tis", "--use-tis: is no part of --loss-type custom_loss"),
        (
            "--loss-type sft_loss --load-debug-rollout-data x{iteration} --custom-advantage-function-path mine:f",
            "--custom-advantage-function-path mine:f: is no part of --loss-type sft_loss",
        ),
    ],
)
def test_a_hook_that_contradicts_the_objective_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        validate(parse(f"{COMMAND} {flags}".split()))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--custom-advantage-function-path mine:f", "A = mine:f(...) .* [mine:f]"),
        (
            "--custom-policy-loss-function-path mine:f --eps-clip 0.1",
            "l_it = mine:f(log p, log p_old, A, ...) [mine:f]",
        ),
        ("--use-tis --custom-tis-function-path mine.f", "w = mine.f(p_old, p_engine) [mine.f]"),
        ("--custom-pg-loss-reducer-function-path mine:f", "pg_loss = mine:f(m, l) [mine:f]"),
        (CUSTOM_LOSS, "loss = mine:loss(log p, log p_old, A, ...) [mine:loss]"),
        ("--rollout-data-postprocess-path mine:f", "A is then what mine:f(...) makes of it [mine:f]"),
    ],
)
def test_explain_names_the_function_without_importing_it(flags, said):
    """Also alongside the term, instead of the file of a built-in part."""
    words = re.sub(r"\s+", " ", explain(validate(parse(f"{COMMAND} {flags}".split()))))
    assert re.search(re.escape(said).replace(r"\.\*", ".*"), words)


def test_the_examples_of_the_docs_run(tmp_path, monkeypatch, make_micro):
    """Every Python block of docs/objective-hooks.md, as one module."""
    page = (Path(__file__).parents[3] / "docs" / "objective-hooks.md").read_text()
    (tmp_path / "of_the_docs.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    monkeypatch.syspath_prepend(tmp_path)
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    for fields in (
        dict(custom_advantage_function_path="of_the_docs:less_the_mean"),
        dict(custom_advantage_function_path="of_the_docs:returns"),
        dict(custom_policy_loss_function_path="of_the_docs:reinforce"),
        dict(custom_loss_function_path="of_the_docs:reinforce_with_entropy", loss_type="custom_loss"),
        dict(custom_loss_function_path="of_the_docs:likelihood", loss_type="custom_loss"),
        dict(custom_tis_function_path="of_the_docs:clipped", use_tis=True),
        dict(rollout_data_postprocess_path="of_the_docs:no_credit_for_long_answers"),
    ):
        loss = LossArguments(**fields)
        check_hooks(loss, None)
        objective = build_objective(loss)
        advantages = objective.sample_advantages(SampleRewards([1.0, 0.0], [0, 0], [0, 1]))
        tokens = [SampleTokens(i, advantage, np.ones(2, np.float32)) for i, advantage in enumerate(advantages)]
        assert len(token_advantages(objective, tokens).advantages) == 2
        output = objective.language_model_loss(make_micro([[1, 1]]), PolicyScores(log_probs, torch.ones(2)))
        assert output.loss.isfinite()
