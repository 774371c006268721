"""What a rank does with one rollout, whatever the backend: score the tokens, then take the optimizer steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from miles.loss.canary import check_loss_mass
from miles.tracking.metrics import Metric
from miles.train_batch import TrainShard
from miles.training.backend import TrainBackend


def train_rollout(
    backend: TrainBackend,
    shards: Sequence[TrainShard],
    use_reference: bool,
    ranks: int,
) -> list[dict[str, Metric]]:
    """Take one optimizer step a shard; returns each step's metrics, with seconds under ``time/``.

    ``ranks`` hold a step, data and context parallel together. Raises ``LossMassError`` before the optimizer moves, if
    the weights of a watched step's tokens do not add up.
    Log-probs under the weights that the rollout began with are needed from the second step on; in the first step they
    are the current ones.
    """
    started = time.perf_counter()
    scored = [
        _with_log_probs(backend, shard, old=step > 0, reference=use_reference) for step, shard in enumerate(shards)
    ]
    scoring = time.perf_counter() - started
    steps = [_step(backend, shard, ranks) for shard in scored]
    if steps:
        steps[0]["time/log_probs"] = Metric(scoring)
    return steps


def _with_log_probs(backend: TrainBackend, shard: TrainShard, old: bool, reference: bool) -> TrainShard:
    batch = shard.batch
    if reference:
        batch = replace(batch, ref_log_probs=backend.log_probs(shard, reference=True))
    if old:
        batch = replace(batch, old_log_probs=backend.log_probs(shard))
    return replace(shard, batch=batch)


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
