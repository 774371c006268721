"""What a rank does with one rollout, whatever the backend: score the tokens, then take the optimizer steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from miles.metrics import Metric
from miles.objective.canary import check_loss_mass
from miles.train_batch import TrainShard
from miles.training.advantages import AdvantageEstimator
from miles.training.backend import Critic, TrainBackend


def train_rollout(
    backend: TrainBackend,
    shards: Sequence[TrainShard],
    use_reference: bool,
    ranks: int,
    estimator: AdvantageEstimator | None = None,
    trains_policy: bool = True,
) -> list[dict[str, Metric]]:
    """Take one optimizer step a shard; returns each step's metrics, with seconds under ``time/``.

    ``ranks`` hold a step, data and context parallel together. Raises ``LossMassError`` before any optimizer moves, if
    the weights of a watched step's tokens do not add up. The policy goes first, so that neither that nor a gradient of
    its own that is not finite finds the critic a step ahead.
    Log-probs under the weights that the rollout began with are needed from the second step on; in the first step they
    are the current ones. Values and advantages are those of the start in every step. The ``estimator`` brings the
    critic; without ``trains_policy`` only that learns.
    """
    started = time.perf_counter()
    reads_kl = estimator is not None and estimator.reads_kl
    scored = [
        _with_log_probs(
            backend,
            shard,
            old=(trains_policy and step > 0) or reads_kl,
            reference=use_reference and (trains_policy or reads_kl),
        )
        for step, shard in enumerate(shards)
    ]
    estimated = [_estimated(estimator, shard) for shard in scored]
    scoring = time.perf_counter() - started
    critic = None if estimator is None else estimator.critic
    steps = []
    for shard, metrics in estimated:
        if trains_policy:
            metrics |= _step(backend, shard, ranks)
        if critic is not None:
            metrics |= _critic_step(critic, shard)
        steps.append(metrics)
    if steps:
        steps[0]["time/log_probs"] = Metric(scoring)
    return steps


def _with_log_probs(backend: TrainBackend, shard: TrainShard, old: bool, reference: bool) -> TrainShard:
    """``shard`` with the log-probs that are asked for and not there yet."""
    batch = shard.batch
    if reference and batch.ref_log_probs is None:
        batch = replace(batch, ref_log_probs=backend.log_probs(shard, reference=True))
    if old and batch.old_log_probs is None:
        batch = replace(batch, old_log_probs=backend.log_probs(shard))
    return replace(shard, batch=batch)


def _estimated(estimator: AdvantageEstimator | None, shard: TrainShard) -> tuple[TrainShard, dict[str, Metric]]:
    if estimator is None:
        return shard, {}
    shard, metrics = estimator.advantages(estimator.values(shard))
    return shard, {f"train/{name}": metric for name, metric in metrics.items()}


def _critic_step(critic: Critic, shard: TrainShard) -> dict[str, Metric]:
    started = time.perf_counter()
    # The canary is the policy's: a shard that is watched is not, here.
    metrics = {
        f"train/{name}": m for name, m in critic.forward_backward(replace(shard, expected_loss_mass=None)).items()
    }
    update = critic.optimizer_step if shard.batch.num_loss_tokens else critic.skip_step
    metrics |= {f"train/critic_{name}": metric for name, metric in update().items()}
    return metrics | {"time/critic": Metric(time.perf_counter() - started)}


def _step(backend: TrainBackend, shard: TrainShard, ranks: int) -> dict[str, Metric]:
    started = time.perf_counter()
    found = backend.forward_backward(shard)
    check_loss_mass(shard, found, ranks)
    metrics = {f"train/{name}": metric for name, metric in found.items()}
    computed = time.perf_counter()
    update = backend.optimizer_step if shard.batch.num_loss_tokens else backend.skip_step
    metrics |= {f"train/{name}": metric for name, metric in update().items()}
    metrics["time/forward_backward"] = Metric(computed - started)
    metrics["time/optimizer"] = Metric(time.perf_counter() - computed)
    return metrics
