"""Trainer and rollout of a run in one process, without Ray: for many short runs of a small model on CPU.

The rank of the trainer and the rollout worker are the objects that Ray's actors hold otherwise, called directly. The
worker's event loop runs in a thread. Seeds, samples and gradients are the same as in a run with Ray.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from miles.config.settings import Settings
from miles.engine.base import LocalHost
from miles.engine.weight_sync.deltas import whole_update
from miles.rollout.ordering import IterationPlanner, OrderingRule
from miles.run.cpu_tuning import use_threads
from miles.run.rollout_actor import GeneratedIteration, RolloutActor
from miles.run.train_actor import TrainActor, TrainedIteration
from miles.types.metrics import Metric
from miles.types.weights import WeightChunk

T = TypeVar("T")


class OneProcessRollout:
    """The rollout worker in this process. It generates ahead, in its thread, as far as the flags allow."""

    def __init__(self, settings: Settings) -> None:
        self.weight_metrics: dict[str, Metric] = {}
        self._worker = RolloutActor(settings, None)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()
        self._started: dict[int, Future[tuple[Any, ...]]] = {}
        self._update: Future[float] | None = None
        self._bytes: int | None = None  # of that update, if it has weights
        self.num_iterations = self._call(self._worker.build(LocalHost("cpu")))
        rule = OrderingRule.from_flags(settings.rollout, settings.reads_samples)
        self._planner = IterationPlanner(rule, self.num_iterations)

    def _begin(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def _call(self, call: Coroutine[Any, Any, T]) -> T:
        return self._begin(call).result()

    def generate(self, iteration: int) -> GeneratedIteration | None:
        """Wait for an iteration, while later ones are generated as the rule allows; None if no prompts are left."""
        for start in self._planner.start_until(iteration):
            self._started[start.iteration] = self._begin(self._worker.generate(start))
        started = self._started.pop(iteration)
        if self._update is not None:  # if it fails, which settling it raises, the iteration may wait for it forever
            either: list[Future[Any]] = [started, self._update]
            wait(either, return_when=FIRST_COMPLETED)
            if self._update.done():
                self._settle_update()
        summary, *shards = started.result()
        return None if summary is None else GeneratedIteration(summary, shards)

    def evaluate(self) -> dict[str, Metric]:
        """Return the metrics of all evaluation sets under the newest weights."""
        self._settle_update()
        return self._call(self._worker.evaluate())

    def update_weights(self, weights: Sequence[WeightChunk] | None, version: int) -> None:
        """Give the engine new weights, after the iterations that older ones generate; None if there is no engine."""
        self._settle_update()
        after = self._planner.load_weights(version)
        self._update = self._begin(self._worker.pipeline.update_weights(weights, version, after))
        self._bytes = None
        if weights is not None:
            self._bytes = sum(tensor.nbytes for chunk in weights for tensor in chunk.tensors.values())
        if self._planner.awaits_loading:
            self._settle_update()

    def _settle_update(self) -> None:
        update, self._update = self._update, None
        if update is not None:
            seconds = update.result()
            self.weight_metrics = {} if self._bytes is None else whole_update(self._bytes, seconds)

    def release_memory(self) -> None:
        """Raise: on CPU, engines and trainer do not take turns."""
        raise AssertionError("check_one_process() allows no GPUs")

    def state(self, iterations_done: int) -> dict[str, Any]:
        """Return the position in the prompts before iteration ``iterations_done``."""
        return self._call(self._worker.state(iterations_done))

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from such a position."""
        self._call(self._worker.restore(state))

    def save_tokenizer(self, folder: Path) -> None:
        """Add the tokenizer to a Hugging Face export."""
        self._call(self._worker.save_tokenizer(str(folder.absolute())))

    def close(self) -> None:
        """Abandon the generation in progress, and end the thread."""

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._worker.close()

        self._call(cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class OneProcessTrainer:
    """The trainer's only rank, in this process and a separate process group."""

    def __init__(self, settings: Settings, total_steps: int) -> None:
        self._rank = TrainActor(0, settings, "cpu")
        self._rank.build(total_steps)

    def train(self, shards_by_token_rank: list[Any], iteration: int) -> TrainedIteration:
        """Take one optimizer step for each shard."""
        return self._rank.train(shards_by_token_rank[0], iteration)

    def export_weights(self) -> list[WeightChunk]:
        """Return copies of the weights: an engine that generates ahead loads them when the trainer has continued."""
        chunks = self._rank.backend.export_weights()
        return [WeightChunk({name: tensor.clone() for name, tensor in chunk.tensors.items()}) for chunk in chunks]

    def resume(self) -> dict[str, Any] | None:
        """Return that there is nothing to resume from."""
        return None

    def export_hf(self, folder: Path) -> None:
        """Write the Hugging Face export into ``folder``."""
        self._rank.export_hf(folder)

    def _refuse(self, *_: Any) -> Any:
        raise AssertionError("check_one_process() allows no GPUs, no --save and no URLs")

    offload = onload = save = settle_save = upload_export = settle_uploads = _refuse


@contextmanager
def both_drivers(settings: Settings) -> Iterator[tuple[OneProcessRollout, OneProcessTrainer]]:
    """Start trainer and rollout of a run that ``check_one_process`` has allowed, and end them."""
    from miles.training.one_process import one_rank  # imports torch

    use_threads("cpu", sharers=2 if settings.rollout.async_steps else 1)
    rollout = OneProcessRollout(settings)
    try:
        with one_rank():
            yield rollout, OneProcessTrainer(settings, rollout.num_iterations * settings.steps_per_iteration)
    finally:
        rollout.close()
