"""Compare policy and critic on Megatron with the oracle of tests/fast/conformance."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from batches import batch_of
from cases import ANYWHERE, BATCHES, VALUE_HEAD, Case, loss_of
from compare import differences, gradient_differences
from conformance_checks import Contracts, RecordedOptimizer, Result, compare_norm_alone, reported
from critic_oracle import ExpectedStep, expected_step, off_policy_with_values
from forked_ranks import error_of
from layouts import RankProcess, gradients, make_backend, plain_model, shard_of, weights

from miles.objective.canary import LossMassError
from miles.objective.settings import LossArguments
from miles.training.megatron.backend import MegatronBackend
from miles.training.trainer import Trainer
from miles.types.metrics import values

Expectations = dict[str, list[tuple[Case, ExpectedStep]]]
PPO: dict[str, Any] = dict(advantage_estimator="ppo", gamma=0.9, lambd=0.8)
CONTRACTS = {"averages": LossArguments(**PPO), "counts tokens": loss_of("token_mean", **PPO)}
BY_TURNS = ("dp2, distributed optimizer", "tp2 with sp", "pp2", "cp2")  # each with the first of its models
MODELS = {
    "one": ("untied",),
    "dp2": ("untied",),
    "dp2, overlapped": ("untied",),
    "dp2, distributed optimizer": ("untied",),
    "tp2": ("tied",),
    "tp2 with sp": ("untied",),
    "pp2": ("untied", "tied"),
    "cp2": ("untied",),
    "dynamic cp": ("untied",),
    "pp2, cp2": ("untied",),
}


def models_of(layout: str, whole: bool) -> tuple[str, ...]:
    """Return the models whose critic is compared under ``layout``."""
    return MODELS.get(layout, ()) if whole else MODELS[layout][:1] if layout in BY_TURNS else ()


def expectations(folder: Path, layouts: Iterable[str], whole: bool) -> Expectations:
    """Compute them by model, before the ranks are forked: on-policy, and with old values, a KL and whitening."""
    by_model: Expectations = {}
    more = dict(value_clip=0.15, kl_coef=0.3, kl_loss_type="k3", normalize_advantages=True)
    for name in sorted({name for layout in layouts for name in models_of(layout, whole)}):
        oracle = plain_model(folder, name, torch.float64).train()
        cases = [
            Case(BATCHES["compacted"], loss_of("sample_mean", **PPO), ANYWHERE, shuffled=True),
            off_policy_with_values(Case(BATCHES["masked"], loss_of("token_mean", **PPO, **more), ANYWHERE), oracle),
            off_policy_with_values(Case(BATCHES["masked"], loss_of("prompt_mean", **PPO, **more), ANYWHERE), oracle),
        ]
        by_model[name] = [(case, expected_step(case, oracle)) for case in cases]
    return by_model


def checks_of(
    name: str, expected: Expectations, contracts: Contracts
) -> dict[str, Callable[[RankProcess], str | None]]:
    """Return the checks of the layout ``name``, under ``contracts``."""
    checks: dict[str, Callable[[RankProcess], str | None]] = {}
    for model in models_of(name, contracts.whole):
        for contract in contracts.of(f"critic of {model}"):
            checks[f"critic of {model}, {contract}"] = partial(
                conforms, model=model, contract=contract, expected=expected[model]
            )
    if name in (("one", "tp2 with sp", "pp2") if contracts.whole else ("one",)):
        checks["critic learns alone"] = critic_learns_alone
    if name == "tp2 with sp":
        checks["critic stays if the policy fails"] = critic_stays_if_the_policy_fails
    if name in (("dp2, distributed optimizer", "tp2", "pp2") if contracts.whole else BY_TURNS[:1]):
        checks["critic comes back from a checkpoint"] = critic_comes_back
    return checks


def conforms(process: RankProcess, model: str, contract: str, expected: list[tuple[Case, ExpectedStep]]) -> str:
    """Return the differences from the oracle, in words; empty if there are none."""
    backend = make_backend(process, model, CONTRACTS[contract], lr=0.0, weight_decay=0.0)
    _set_head(backend)
    messages = []
    for case, step in expected:
        result, of_critic = _run(backend, case)
        reference, lines = step.gradients, []
        if process.layout.sizes.use_distributed_optimizer:
            reference, lines = compare_norm_alone(result, step.gradients)
        else:
            lines += [f"critic: {line}" for line in gradient_differences(of_critic, step.critic_gradients)]
        lines += differences(result, reference, step.metrics)
        messages += [f"{case.loss.loss_aggregation}: {line}" for line in lines]
    return "\n".join(messages)


def _set_head(backend: MegatronBackend) -> None:
    assert backend.critic is not None
    head = backend.critic.stage.value_head
    if head is not None:
        head.data.copy_(torch.from_numpy(VALUE_HEAD))
    backend.critic.optimizer.adam.reload_model_params()


def _critic_gradients(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    """Return whole gradients: the decoder's by Hugging Face name, and the head's, which is on the last stage."""
    assert backend.critic is not None
    model, ranks = backend.critic.stage, backend.ranks
    tensors = {n: g.clone() for n, g in backend.converter.export(model, lambda p: p.main_grad, torch.float32)}
    head = torch.zeros(VALUE_HEAD.shape) if model.value_head is None else model.value_head.main_grad.clone()
    dist.broadcast(head, ranks.last_stage, group=ranks.pp)
    return {**tensors, "value_head": head}


def _run(backend: MegatronBackend, case: Case) -> tuple[Result, dict[str, Any]]:
    trainer = Trainer(backend, case.loss, backend.settings.dims.token_ranks)
    assert trainer.critic is not None
    policy = RecordedOptimizer(trainer.policy.optimizer, lambda: gradients(backend))
    critic = RecordedOptimizer(trainer.critic.optimizer, lambda: _critic_gradients(backend))
    trainer.policy = replace(trainer.policy, optimizer=policy)  # type: ignore[arg-type]
    trainer.critic = replace(trainer.critic, optimizer=critic)  # type: ignore[arg-type]
    metrics = reported(trainer, shard_of(backend, batch_of(case), watch_mass=case.off_policy))
    return Result(policy.gradients, metrics), critic.gradients


def critic_comes_back(process: RankProcess) -> None:
    """Policy, critic and optimizers are restored: the steps after loading equal the steps of the run that saved."""
    loss = LossArguments(advantage_estimator="ppo", lambd=0.9)
    backend = make_backend(process, "tied", loss, lr=1e-2, weight_decay=0.1)
    _learn(backend, loss, seed=1, trains_policy=False)
    _learn(backend, loss, seed=2)
    folder = process.folder / f"critic of {process.name}"
    folder.mkdir(exist_ok=True)
    backend.save(folder, {"rollouts_done": 2})
    resumed = make_backend(process, "tied", loss, lr=1e-2, weight_decay=0.1)
    assert resumed.load(folder) == {"rollouts_done": 2}
    assert resumed.critic is not None and (
        resumed.critic.optimizer.steps_done,
        resumed.policy.optimizer.steps_done,
    ) == (2, 1)
    for seed in (3, 4):
        assert _learn(resumed, loss, seed) == _learn(backend, loss, seed)
    without = make_backend(process, "tied", LossArguments(), lr=1e-2)
    bare = process.folder / f"no critic of {process.name}"
    bare.mkdir(exist_ok=True)
    without.save(bare, {})
    message = error_of(ValueError, resumed.load, bare)
    assert "has no critic" in message


def _learn(backend: MegatronBackend, loss: LossArguments, seed: int, trains_policy: bool = True) -> dict[str, float]:
    case = Case(BATCHES["uneven"], loss, ANYWHERE, seed=seed)
    shard = shard_of(backend, batch_of(case), watch_mass=False)
    (metrics,) = Trainer(backend, loss, backend.settings.dims.token_ranks).train([shard], trains_policy)
    return {name: value for name, value in values(metrics).items() if "time/" not in name}


def critic_learns_alone(process: RankProcess) -> None:
    """The policy stays equal bit for bit; the critic's loss falls on the same step."""
    loss = LossArguments(advantage_estimator="ppo", lambd=0.9)
    backend = make_backend(process, "untied", loss, lr=1e-2, weight_decay=0.1)
    before = weights(backend)
    metrics = [_learn(backend, loss, seed=0, trains_policy=False) for _ in range(5)]
    after = weights(backend)
    assert all(torch.equal(before[n], after[n]) for n in before) and backend.policy.optimizer.steps_done == 0
    assert "train/pg_loss" not in metrics[0] and metrics[-1]["train/value_loss"] < 0.9 * metrics[0]["train/value_loss"]


def critic_stays_if_the_policy_fails(process: RankProcess) -> None:
    """An unexpected loss mass ends the step before either optimizer updates."""
    loss = LossArguments(advantage_estimator="ppo", lambd=0.9)
    backend = make_backend(process, "untied", loss, lr=1e-2)
    shard = shard_of(backend, batch_of(Case(BATCHES["uneven"], loss, ANYWHERE)))
    assert shard.expected_loss_mass is not None and backend.critic is not None
    wrong = replace(shard, expected_loss_mass=2 * shard.expected_loss_mass)
    failed = False
    try:
        Trainer(backend, loss, backend.settings.dims.token_ranks).train([wrong])
    except LossMassError:
        failed = True
    assert failed and backend.policy.optimizer.steps_done == backend.critic.optimizer.steps_done == 0
