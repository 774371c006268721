"""Policy and critic together: checkpoints of both, and iterations that train only the critic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from cases import FIXED
from forked_ranks import error_of
from stage import PLAIN, Stage, all_full, make_backend, make_batch, shard_of, weights

from miles.training.fsdp.backend import FsdpBackend
from miles.training.trainer import Trainer
from miles.types.metrics import values

PPO = replace(PLAIN, advantage_estimator="ppo", lambd=0.9, normalize_advantages=True)
RATES: dict[str, Any] = dict(lr=1e-2, weight_decay=0.1)


def _critic_weights(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    assert backend.critic is not None
    return all_full(dict(backend.critic.module.named_parameters()))


def _train(stage: Stage, backend: FsdpBackend, seed: int, trains_policy: bool = True) -> dict[str, float]:
    shard = shard_of(stage, make_batch(PPO, seed=seed), FIXED)
    (metrics,) = Trainer(backend, PPO, dist.get_world_size()).train([shard], trains_policy)
    return {name: value for name, value in values(metrics).items() if not name.startswith("time/")}


def critic_learns_alone(stage: Stage) -> None:
    """The policy's weights, optimizer and schedule stay equal bit for bit; the critic's loss falls on the same step."""
    backend = make_backend(stage, loss=PPO, **RATES)
    before, critic_before = weights(backend), _critic_weights(backend)
    metrics = [_train(stage, backend, seed=1, trains_policy=False) for _ in range(6)]
    after = weights(backend)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert backend.policy.optimizer.steps_done == 0 and not backend.policy.optimizer.adam.state
    assert all(p.grad is None for p in backend.policy.module.parameters())
    assert metrics[-1]["train/value_loss"] < 0.9 * metrics[0]["train/value_loss"]
    assert metrics[-1]["train/explained_variance"] > metrics[0]["train/explained_variance"] == 0
    assert not {"train/pg_loss", "train/lr", "train/grad_norm"} & metrics[0].keys()
    critic_after = _critic_weights(backend)
    assert all(not torch.equal(critic_before[n], critic_after[n]) for n in critic_before)


def critic_of_a_checkpoint_is_the_one_that_was_saved(stage: Stage) -> None:
    """Both models and optimizers are restored: later steps equal the steps of the run that saved, bit for bit."""
    backend = make_backend(stage, loss=PPO, **RATES)
    _train(stage, backend, seed=1, trains_policy=False)
    _train(stage, backend, seed=2)
    folder = stage.folder / "critic"
    folder.mkdir(exist_ok=True)
    backend.save(folder, {"rollout": 2})
    resumed = make_backend(stage, loss=PPO, **RATES)
    assert resumed.load(folder) == {"rollout": 2}
    assert resumed.critic is not None and (
        resumed.critic.optimizer.steps_done,
        resumed.policy.optimizer.steps_done,
    ) == (2, 1)
    for seed in (3, 4):
        assert _train(stage, resumed, seed) == _train(stage, backend, seed)
    for of in (weights, _critic_weights):
        tensors, wanted = of(resumed), of(backend)
        assert all(torch.equal(tensors[n], wanted[n]) for n in wanted)


def checkpoint_without_a_critic_is_refused(stage: Stage) -> None:
    folder = stage.folder / "no_critic"
    folder.mkdir(exist_ok=True)
    make_backend(stage).save(folder, {})
    message = error_of(ValueError, make_backend(stage, loss=PPO).load, folder)
    assert "has no critic" in message and "--hf-checkpoint" in message


def saved_critic_survives_another_number_of_ranks(stage: Stage) -> None:
    """One rank reads what two ranks saved."""
    backend = make_backend(stage, loss=PPO, **RATES)
    backend.load(stage.folder / "critic")
    assert backend.critic is not None and backend.critic.optimizer.steps_done == 2
    assert backend.critic.module.value_head.weight.abs().max() > 0


CHECKS = (critic_learns_alone,)
ON_TWO_RANKS = (critic_of_a_checkpoint_is_the_one_that_was_saved, checkpoint_without_a_critic_is_refused)
AFTER_TWO_RANKS = (saved_critic_survives_another_number_of_ranks,)
