"""A loss of ``(args, batch, logits, sum_of_sample_mean)``: its arguments, and that its value is the step's loss."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tolerance import FEW_ROUNDINGS

from miles.objective.chosen import build_objective
from miles.objective.hooks import check_hooks
from miles.objective.loss_types.policy_loss import policy_loss_function
from miles.objective.output import PolicyScores
from miles.objective.settings import LossArguments

LOSSES = """
import torch
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
from slime.utils.types import RolloutBatch

def read(args, batch, logits, **more):
    _, scores = get_log_probs_and_entropy(
        logits, args=args, unconcat_tokens=batch["unconcat_tokens"], total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"], with_entropy=True, **more,
    )
    return torch.cat(scores["log_probs"]), torch.cat(scores["entropy"])

def ppo(args, batch: RolloutBatch, logits, sum_of_sample_mean):
    from miles.utils.ppo_utils import compute_approx_kl, compute_policy_loss
    log_probs, entropy = read(args, batch, logits)
    old = torch.cat(batch["log_probs"])
    losses, clipped = compute_policy_loss(
        old - log_probs, torch.cat(batch["advantages"]), args.eps_clip, args.eps_clip_high
    )
    kl = sum_of_sample_mean(compute_approx_kl(log_probs, torch.cat(batch["ref_log_probs"]), args.kl_loss_type))
    entropy = sum_of_sample_mean(entropy)
    pg_loss = sum_of_sample_mean(losses)
    loss = pg_loss - args.entropy_coef * entropy + args.kl_loss_coef * kl
    return loss, {"loss": loss.detach(), "pg_loss": pg_loss.detach(), "pg_clipfrac": sum_of_sample_mean(clipped),
                  "entropy_loss": entropy.detach(), "kl_loss": kl.detach()}

def whole_logits(args, batch, logits, sum_of_sample_mean):
    return sum_of_sample_mean(logits.log_softmax(-1)), {}

def sliced(args, batch, logits, sum_of_sample_mean):
    return sum_of_sample_mean(logits[0]), {}

def other_tokens(args, batch, logits, sum_of_sample_mean):
    batch = {**batch, "unconcat_tokens": [tokens + 1 for tokens in batch["unconcat_tokens"]]}
    return sum_of_sample_mean(read(args, batch, logits)[0]), {}

def unknown_column(args, batch, logits, sum_of_sample_mean):
    return sum_of_sample_mean(torch.cat(batch["values"])), {}

def unknown_import(args, batch, logits, sum_of_sample_mean):
    from slime.backends.megatron_utils.loss import get_responses

def vector(args, batch, logits, sum_of_sample_mean):
    return read(args, batch, logits)[0], {}
"""
KL = dict(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k3", entropy_coef=0.1, eps_clip=0.2, eps_clip_high=0.3)


@pytest.fixture
def four(tmp_path, monkeypatch):
    """Settings that name a function of ``LOSSES``."""
    module = f"four_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(LOSSES)
    monkeypatch.syspath_prepend(tmp_path)

    def settings(name: str, **fields) -> LossArguments:
        return LossArguments(loss_type="custom_loss", custom_loss_function_path=f"{module}:{name}", **fields)

    return settings


def loss_of(settings, micro, log_probs, entropy):
    objective = replace(build_objective(settings), args=SimpleNamespace(**vars(settings)))
    return objective.language_model_loss(micro, PolicyScores(log_probs, entropy))


@pytest.mark.parametrize("per_token", [False, True])
def test_it_is_the_built_in_loss_if_written_alike(make_micro, four, per_token):
    """Loss, gradient and metrics, over the counts of a step that has more than this micro-batch."""
    generator = torch.Generator().manual_seed(3)
    columns = {name: torch.randn(6, generator=generator) for name in ("advantages", "old_log_probs", "ref_log_probs")}
    micro = make_micro([[1, 0, 1], [1, 1, 1]], num_trajectories=5, num_loss_tokens=17, **columns)
    entropy = torch.rand(6, generator=generator)
    mode = dict(calculate_per_token_loss=per_token, loss_aggregation="token_mean" if per_token else "sample_mean")
    built_in = torch.randn(6, generator=generator).requires_grad_()
    mine = built_in.detach().clone().requires_grad_()
    expected = policy_loss_function(build_objective(LossArguments(**KL, **mode)), micro, built_in, entropy)
    result = loss_of(four("ppo", **KL, **mode), micro, mine, entropy)
    expected.loss.backward()
    result.loss.backward()
    assert torch.allclose(mine.grad, built_in.grad) and mine.grad.abs().sum() > 0
    for name in ("loss", "pg_loss", "pg_clipfrac", "entropy_loss", "kl_loss"):
        wanted = expected.metrics[name].item()
        assert result.metrics[name].item() == pytest.approx(wanted, rel=FEW_ROUNDINGS, abs=FEW_ROUNDINGS), name


def test_a_rank_without_samples_reports_the_same_metrics(make_micro, four):
    settings, leaf = four("ppo", **KL), torch.zeros(0, requires_grad=True)
    empty = make_micro([], total_lengths=(1,), num_trajectories=2, ref_log_probs=torch.zeros(0))
    full = make_micro([[1, 1]], num_trajectories=2, ref_log_probs=torch.zeros(2))
    nothing = loss_of(settings, empty, leaf, leaf)
    something = loss_of(settings, full, torch.zeros(2, requires_grad=True), torch.ones(2))
    nothing.loss.backward()
    assert nothing.metrics.keys() == something.metrics.keys() and leaf.grad is not None
    assert {value.item() for value in nothing.metrics.values()} == {0.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("whole_logits", "reads logits.log_softmax: whole logits do not exist in this launcher; read log-probs"),
        ("sliced", "computes with logits as with a tensor"),
        ("other_tokens", "log-probs of other tokens"),
        ("unknown_column", r"reads batch\['values'\], which is not here; a batch has advantages, log_probs"),
        ("unknown_import", "get_responses is part of another launcher.*can import get_log_probs_and_entropy"),
        ("vector", "returned shape"),
    ],
)
def test_what_it_cannot_have_is_said_before_the_run_starts(four, name, message):
    settings = four(name)
    with pytest.raises((ValueError, ImportError), match=message):
        check_hooks(settings, SimpleNamespace(**vars(settings)))


@pytest.mark.parametrize("mode", ["prompt_mean", "constant"])
def test_an_aggregation_that_it_would_ignore_is_refused(four, mode):
    with pytest.raises(ValueError, match=f"--loss-aggregation {mode}: would be ignored by --custom-loss-function"):
        check_hooks(four("ppo", loss_aggregation=mode), None)


def test_a_reducer_that_it_would_ignore_is_refused(four):
    with pytest.raises(ValueError, match="--custom-pg-loss-reducer-function-path builtins:len: would be ignored"):
        check_hooks(four("ppo", custom_pg_loss_reducer_function_path="builtins:len"), None)
