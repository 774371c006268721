"""The rollout worker as the launcher talks to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from miles.arguments.settings import Settings
from miles.cluster.rollout_worker import GeneratedRollout, RolloutWorker
from miles.cluster.session import Placement
from miles.sample import Sample
from miles.tracking.metrics import Metric
from miles.tracking.run_files import SampleRecord


@dataclass(frozen=True)
class RolloutResult:
    """A rollout as the launcher sees it."""

    generated: GeneratedRollout

    @property
    def shards_by_rank(self) -> list[ray.ObjectRef]:
        return self.generated.shards_by_rank

    @property
    def metrics(self) -> dict[str, Metric]:
        return self.generated.metrics

    def records(self) -> list[SampleRecord]:
        """A few answers for the report."""
        return [_record(sample) for sample in self.generated.samples]


class RolloutGroup:
    """Starts the rollout worker and calls it."""

    def __init__(self, settings: Settings, placement: Placement) -> None:
        self.settings = settings
        actor: Any = ray.remote(RolloutWorker).options(**placement.rollout_options())
        self.worker: Any = actor.remote(settings, placement)
        self.prompts: int = ray.get(self.worker.prepare.remote())

    def total_rollouts(self) -> int:
        """``--num-rollout``, or what ``--num-epoch`` passes over the prompts make."""
        rollout = self.settings.rollout
        if rollout.num_rollout is not None:
            return rollout.num_rollout
        assert rollout.num_epoch is not None and rollout.rollout_batch_size is not None, "validate() demands it"
        return math.ceil(rollout.num_epoch * self.prompts / rollout.rollout_batch_size)

    def generate(self, rollout_id: int) -> RolloutResult:
        """Collect a rollout; its shards are in the object store."""
        return RolloutResult(ray.get(self.worker.generate.remote(rollout_id)))

    def evaluate(self) -> dict[str, Metric]:
        """Metrics of all evaluation sets."""
        return ray.get(self.worker.evaluate.remote())

    def update_weights(self, packed: list[ray.ObjectRef], version: int) -> None:
        """Give the engine new weights. The list is wrapped, so that Ray passes references and not the weights."""
        ray.get(self.worker.update_weights.remote(packed, version))

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return ray.get(self.worker.state.remote())

    def restore(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        ray.get(self.worker.restore.remote(state))

    def save_tokenizer(self, folder: Path) -> None:
        """Complete a Hugging Face export."""
        ray.get(self.worker.save_tokenizer.remote(str(folder.absolute())))


def _record(sample: Sample) -> SampleRecord:
    return SampleRecord(sample.prompt.text, sample.response, sample.reward, sample.prompt.label, sample.status.value)
