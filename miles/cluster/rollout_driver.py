"""The rollout worker as the launcher talks to it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import ray
import ray.exceptions

from miles.arguments.settings import Settings
from miles.cluster.failures import cause_of, in_one_line
from miles.cluster.liveness import WorkerLost, Workers, with_pulse
from miles.cluster.rollout_actor import GeneratedRollout, RolloutActor
from miles.cluster.session import Placement
from miles.metrics import Metric
from miles.sample import Sample
from miles.tracking.run_files import SampleRecord

T = TypeVar("T")

WORKER_TRIES = 4  # in a row: a worker that cannot do what it is asked is not replaced for ever
REPLACED = "train.py: {}; the rollout worker is replaced, and what was being generated is generated again"
CLOSE_SECONDS = 20.0  # for the servers to be stopped, a few seconds each, all at once


@dataclass(frozen=True)
class RolloutResult:
    """A rollout as the launcher sees it."""

    generated: GeneratedRollout
    shards_by_rank: list[ray.ObjectRef]  # each a list of TrainShard, one an optimizer step

    @property
    def metrics(self) -> dict[str, Metric]:
        return self.generated.metrics

    def records(self) -> list[SampleRecord]:
        """A few answers for the report."""
        return [_record(sample) for sample in self.generated.samples]


class RolloutDriver:
    """Starts the rollout worker and calls it.

    With ``--async-steps K`` it has K rollouts under way while one is trained: rollout r is generated with the weights
    of version r - K (those that were trained on r - K rollouts), so that the result depends on no timing. New weights
    arrive between two rollouts; one update at a time waits for that, as each holds a whole model in memory. With
    ``--fully-async`` they arrive at once, and the worker runs ahead by itself.

    With ``--use-fault-tolerance`` a worker that dies or hangs is replaced: the new one starts engines, gets the newest
    weights and the position in the prompts after the last rollout that was handed over, and generates what was under
    way again. Rollouts that were handed over are not lost with the worker. So each prompt is trained on once.
    """

    def __init__(self, settings: Settings, placement: Placement, workers: Workers) -> None:
        self.settings = settings
        self._workers = workers
        rollout = settings.rollout
        self._ahead = 0 if rollout.fully_async else rollout.async_steps
        self._first_version = 0  # that of the weights the run starts with
        self._begun: dict[int, list[ray.ObjectRef]] = {}  # rollouts under way
        self._last_begun: int | None = None
        self._update: ray.ObjectRef | None = None  # the weight update under way
        self._replaces = settings.sglang.use_fault_tolerance
        self._dead = False
        self._position: dict[str, Any] | None = None  # in the prompts, after the last rollout that was handed over
        self._weights: tuple[list[ray.ObjectRef], int] | None = None  # the newest, where workers are replaced
        self._actor: Any = with_pulse(RolloutActor).options(**placement.rollout_options())
        self._placement = placement
        self.num_iterations = self._start()

    def _start(self) -> int:
        """Start a worker; returns how many rollouts the run has."""
        self.worker: Any = self._actor.remote(self.settings, self._placement)
        self._workers.add("the rollout worker", self.worker, replaceable=self._replaces)
        try:
            return self._result(self.worker.prepare.remote())
        except BaseException:
            self.stop()
            raise

    def generate(self, iteration: int) -> RolloutResult:
        """Wait for a rollout, with those after it begun; its shards are in the object store."""

        def ask() -> GeneratedRollout:
            self._begin_until(min(iteration + self._ahead, self.num_iterations - 1), first=iteration)
            return self._result(self._begun[iteration][0])

        generated = self._surviving(ask)
        self._position = generated.prompts_after
        return RolloutResult(generated, self._begun.pop(iteration)[1:])

    def _surviving(self, call: Callable[[], T]) -> T:
        """The result of ``call``. A worker that is lost meanwhile is replaced, where it may be, and asked again."""
        for tries_left in reversed(range(WORKER_TRIES if self._replaces else 1)):
            try:
                if self._dead:
                    self._replace()
                return call()
            except ray.exceptions.RayError as error:
                lost = isinstance(error, WorkerLost) and error.worker is self.worker
                # A new worker whose engines do not start, since one was killed as well, gets its tries too.
                failed_again = self._dead and not isinstance(cause_of(error), WorkerLost | ValueError)
                if tries_left == 0 or not (lost or failed_again):
                    raise
                self._dead = True
                print(REPLACED.format(in_one_line(error)), file=sys.stderr, flush=True)
        raise AssertionError("unreachable")

    def _replace(self) -> None:
        self._workers.end(self.worker)
        self._begun.clear()
        self._last_begun = self._update = None
        self._start()
        if self._position is not None:
            self._result(self.worker.restore.remote(self._position))
        if self._weights is not None:
            packed, self._first_version = self._weights
            self._result(self.worker.update_weights.remote(packed, self._first_version, None))
        self._dead = False

    def _begin_until(self, last: int, first: int) -> None:
        for iteration in range(first if self._last_begun is None else self._last_begun + 1, last + 1):
            version = max(self._first_version, iteration - self.settings.rollout.async_steps)
            generate = self.worker.generate.options(num_returns=1 + self.settings.token_ranks)
            self._begun[iteration] = generate.remote(iteration, self._last_begun, version)
            self._last_begun = iteration

    def _result(self, call: ray.ObjectRef) -> Any:
        """The result of ``call``. A weight update that fails meanwhile is raised: ``call`` may wait for it in vain."""
        beside = [] if self._update is None else [self._update]
        return self._workers.results([call], beside, whose=self.worker)[0]

    def evaluate(self) -> dict[str, Metric]:
        """Metrics of all evaluation sets, under the newest weights."""

        def ask() -> dict[str, Metric]:
            self._settle_update()
            return self._result(self.worker.evaluate.remote())

        return self._surviving(ask)

    def update_weights(self, packed: list[ray.ObjectRef], version: int) -> None:
        """Give the engine new weights. The list is wrapped, so that Ray passes references and not the weights."""
        if self._replaces:
            self._weights = (packed, version)
        self._surviving(lambda: self._send(packed, version))

    def _send(self, packed: list[ray.ObjectRef], version: int) -> None:
        self._settle_update()
        if self._last_begun is None:
            self._first_version = version
        after = None if self.settings.rollout.fully_async else self._last_begun
        self._update = self.worker.update_weights.remote(packed, version, after)
        if self.settings.rollout.async_steps == 0 or self._last_begun is None:
            self._settle_update()

    def _settle_update(self) -> None:
        if self._update is not None:
            self._workers.results([self._update], whose=self.worker)
            self._update = None

    def release_memory(self) -> None:
        """Have the engines give their GPU memory up until ``update_weights``."""
        self._surviving(lambda: self._result(self.worker.release_memory.remote()))

    def state(self, rollouts_done: int) -> dict[str, Any]:
        """For a checkpoint: a run that resumes from it draws every prompt that was not trained on."""
        return self._surviving(lambda: self._result(self.worker.state.remote(rollouts_done)))

    def restore(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self._position = state
        self._surviving(lambda: self._result(self.worker.restore.remote(state)))

    def save_tokenizer(self, folder: Path) -> None:
        """Complete a Hugging Face export."""
        self._surviving(lambda: self._result(self.worker.save_tokenizer.remote(str(folder.absolute()))))

    def stop(self) -> None:
        """End the worker, whatever it is doing, and the servers that it has started."""
        if self.settings.num_engines:
            # A worker that has died, or answers to nobody, takes its servers with it, if less gently.
            with suppress(ray.exceptions.RayError):
                ray.get(self.worker.close.remote(), timeout=CLOSE_SECONDS)
        self._workers.end(self.worker)

    def __enter__(self) -> RolloutDriver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _record(sample: Sample) -> SampleRecord:
    return SampleRecord(sample.prompt.text, sample.response, sample.reward, sample.prompt.label, sample.status.value)
