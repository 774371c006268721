"""The rollout worker as the launcher talks to it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
import ray.exceptions

from miles.arguments.settings import Settings
from miles.cluster.rollout_worker import GeneratedRollout, RolloutWorker
from miles.cluster.session import Placement
from miles.sample import Sample
from miles.tracking.metrics import Metric
from miles.tracking.run_files import SampleRecord

CLOSE_SECONDS = 20.0  # for the servers to be stopped, a few seconds each, all at once


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
    """Starts the rollout worker and calls it.

    With ``--async-steps K`` it has K rollouts under way while one is trained: rollout r is generated with the weights
    of version r - K (those that were trained on r - K rollouts), so that the result depends on no timing. New weights
    arrive between two rollouts, and nobody waits for that but the next rollout. With ``--fully-async`` they arrive at
    once, and the worker runs ahead by itself.
    """

    def __init__(self, settings: Settings, placement: Placement) -> None:
        self.settings = settings
        rollout = settings.rollout
        self._ahead = 0 if rollout.fully_async else rollout.async_steps
        self._first_version = 0  # that of the weights the run starts with
        self._begun: dict[int, ray.ObjectRef] = {}  # rollouts under way
        self._last_begun: int | None = None
        self._update: ray.ObjectRef | None = None  # the weight update under way
        actor: Any = ray.remote(RolloutWorker).options(**placement.rollout_options())
        self.worker: Any = actor.remote(settings, placement)
        try:
            self.total_rollouts: int = ray.get(self.worker.prepare.remote())
        except BaseException:
            self.stop()
            raise

    def generate(self, rollout_id: int) -> RolloutResult:
        """Wait for a rollout, with those after it begun; its shards are in the object store."""
        self._begin_until(min(rollout_id + self._ahead, self.total_rollouts - 1), first=rollout_id)
        return RolloutResult(self._wait(self._begun.pop(rollout_id)))

    def _begin_until(self, last: int, first: int) -> None:
        for rollout_id in range(first if self._last_begun is None else self._last_begun + 1, last + 1):
            version = max(self._first_version, rollout_id - self.settings.rollout.async_steps)
            self._begun[rollout_id] = self.worker.generate.remote(rollout_id, self._last_begun, version)
            self._last_begun = rollout_id

    def _wait(self, call: ray.ObjectRef) -> Any:
        """The result of ``call``. A weight update that fails meanwhile is raised: ``call`` may wait for it in vain."""
        pending = [call] if self._update is None else [call, self._update]
        while call in pending:
            done, pending = ray.wait(pending, num_returns=1)
            ray.get(done)
        return ray.get(call)

    def evaluate(self) -> dict[str, Metric]:
        """Metrics of all evaluation sets, under the newest weights."""
        self._settle_update()
        return ray.get(self.worker.evaluate.remote())

    def update_weights(self, packed: list[ray.ObjectRef], version: int) -> None:
        """Give the engine new weights. The list is wrapped, so that Ray passes references and not the weights."""
        self._settle_update()
        if self._last_begun is None:
            self._first_version = version
        after = None if self.settings.rollout.fully_async else self._last_begun
        self._update = self.worker.update_weights.remote(packed, version, after)
        if self.settings.rollout.async_steps == 0 or self._last_begun is None:
            self._settle_update()

    def _settle_update(self) -> None:
        if self._update is not None:
            ray.get(self._update)
            self._update = None

    def state(self, rollouts_done: int) -> dict[str, Any]:
        """For a checkpoint: a run that resumes from it draws every prompt that was not trained on."""
        return ray.get(self.worker.state.remote(rollouts_done))

    def restore(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        ray.get(self.worker.restore.remote(state))

    def save_tokenizer(self, folder: Path) -> None:
        """Complete a Hugging Face export."""
        ray.get(self.worker.save_tokenizer.remote(str(folder.absolute())))

    def stop(self) -> None:
        """End the worker, whatever it is doing, and the servers that it has started."""
        if self.settings.num_engines:
            # A worker that has died, or answers to nobody, takes its servers with it, if less gently.
            with suppress(ray.exceptions.RayError):
                ray.get(self.worker.close.remote(), timeout=CLOSE_SECONDS)
        ray.kill(self.worker)

    def __enter__(self) -> RolloutGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _record(sample: Sample) -> SampleRecord:
    return SampleRecord(sample.prompt.text, sample.response, sample.reward, sample.prompt.label, sample.status.value)
