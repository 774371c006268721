"""The rollout side of a run in one Ray actor: prompts, engine, rewards, and the batches made of them."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ray
from transformers.utils.logging import disable_progress_bar

from miles.arguments.settings import Settings
from miles.batching.convert import convert
from miles.batching.schedule import schedule_step
from miles.cluster.cpu_tuning import use_threads
from miles.cluster.engine_servers import RayHost
from miles.cluster.liveness import PULSE
from miles.cluster.session import Placement
from miles.data.prompts import load_prompts
from miles.data.stream import PromptStream
from miles.data.tokenizer import load_tokenizer
from miles.engine.base import Engine, ReleasesMemory
from miles.engine.table import start_engine
from miles.metrics import Metric
from miles.objective.canary import CanarySchedule
from miles.objective.policy_objective import samples_with_gradient
from miles.rewards.registry import get_reward_function
from miles.rollout.collect import Rollout, RolloutSource
from miles.rollout.debug_data import load_rollout, save_rollout
from miles.rollout.eval_sets import load_eval_sets
from miles.rollout.evaluate import evaluate
from miles.rollout.multi_turn import get_group_generator
from miles.rollout.off_policy import staleness_metrics
from miles.rollout.ordering import RolloutOrder
from miles.rollout.rollout_metrics import rollout_metrics
from miles.rollout.source import build_source
from miles.sample import Sample
from miles.train_batch import TrainBatch, TrainShard
from miles.weights import PackedChunk, WeightChunk, unpack


@dataclass(frozen=True)
class GeneratedRollout:
    """What the launcher learns of a rollout. The batches themselves stay in the object store."""

    metrics: dict[str, Metric]
    samples: list[Sample]  # a few, for the report
    prompts_after: dict[str, Any]  # position in the prompts with this rollout drawn, for whoever takes over


class StoredWeights:
    """The chunks of one update, in the object store; each pass over them has one in memory at a time.

    Passing over them blocks: it is for a thread of the engine's, not for the event loop.
    """

    def __init__(self, packed: list[ray.ObjectRef]) -> None:
        self._packed = packed

    def __iter__(self) -> Iterator[WeightChunk]:
        for reference in self._packed:
            # Not ``ray.get``, which warns in an asyncio actor whichever thread calls it.
            chunk: PackedChunk = reference.future().result()
            yield unpack(chunk)


class RolloutActor:
    """Generates, scores, converts and evaluates.

    An asyncio actor: with ``--async-steps`` rollouts are under way while weights arrive and checkpoints are written.
    ``RolloutOrder`` says what waits for what.
    """

    def __init__(self, settings: Settings, placement: Placement) -> None:
        """Does nothing that can fail: Ray turns what a constructor raises into the death of the actor."""
        self.settings = settings
        self.placement = placement
        self.device = placement.device
        self.canary = CanarySchedule(settings.loss)
        self.engine: Engine | None = None
        self.order = RolloutOrder()
        self.states: dict[int, dict[str, Any]] = {}  # position in the prompts before each rollout that is under way

    async def prepare(self) -> int:
        """Load prompts, evaluation sets and the engine; returns how many rollouts the run has.

        Raises ``ValueError`` for a malformed row, an unknown reward and the like.
        """
        settings = self.settings
        assert settings.model.hf_checkpoint is not None
        disable_progress_bar()  # of loading weights: the launcher's own is the one on the screen
        use_threads(
            self.device, sharers=1 if settings.cluster.colocate else 1 + settings.cluster.actor_num_gpus_per_node
        )
        self.tokenizer = load_tokenizer(settings.model.hf_checkpoint)
        self.reward_function = get_reward_function(settings.reward) if self._scores else None
        self.eval_sets = load_eval_sets(settings.evaluation, settings.data, settings.rollout, self.tokenizer)
        self.stream: PromptStream | None = None
        num_prompts = 0
        if settings.data.prompt_data is not None:
            prompts = load_prompts(settings.data.prompt_data, settings.data, self.tokenizer).prompts
            self.stream = PromptStream(prompts, settings.data.rollout_shuffle, settings.data.rollout_seed)
            num_prompts = len(prompts)
        self.engine = await start_engine(settings, RayHost(self.placement)) if settings.generates else None
        self.generate_group = get_group_generator(settings.rollout)
        num_iterations = self._num_iterations(num_prompts)
        self.source = self._build_source(num_iterations)
        return num_iterations

    @property
    def _scores(self) -> bool:
        return self.settings.reward.rm_type is not None or self.settings.reward.custom_rm_path is not None

    def _num_iterations(self, num_prompts: int) -> int:
        """``--num-rollout``, or what ``--num-epoch`` passes over the prompts make."""
        rollout = self.settings.rollout
        if rollout.num_rollout is not None:
            return rollout.num_rollout
        assert rollout.num_epoch is not None and rollout.rollout_batch_size is not None, "validate() demands it"
        return math.ceil(rollout.num_epoch * num_prompts / rollout.rollout_batch_size)

    def _build_source(self, num_iterations: int) -> RolloutSource | None:
        if self.settings.rollout.load_debug_rollout_data is not None:
            return None
        assert self.stream is not None and self.engine is not None and self.reward_function is not None
        return build_source(
            self.stream,
            self.engine,
            self.tokenizer,
            self.reward_function,
            self.settings.rollout,
            self.settings.reward,
            self.settings.data.rollout_seed,
            self.generate_group,
            num_iterations,
        )

    async def generate(
        self, iteration: int, after: int | None, version: int
    ) -> tuple[GeneratedRollout | list[TrainShard], ...]:
        """Collect rollout ``iteration``; returns what there is to say about it, and for each token rank its shards.

        Begins when rollout ``after`` is whole (None: at once) and the engine has the weights of ``version``. To be
        called with as many ``num_returns``: then the shards are the launcher's, and outlive this worker.
        """
        async with self.order.rollout(iteration, after, version):
            oldest = iteration - self.settings.rollout.async_steps  # that the launcher may still ask for
            self.states = {i: state for i, state in self.states.items() if i >= oldest}
            self.states[iteration] = self._position()
            began = time.perf_counter()
            rollout = await self._collect(iteration)
            prompts_after = self._position()
            if self.settings.rollout.async_steps:  # else it is the launcher's time/generate
                rollout.metrics["time/rollout"] = Metric(time.perf_counter() - began)
            steps = await asyncio.to_thread(self._schedule, iteration, rollout)  # the engine goes on meanwhile
        shards = [list(of_rank) for of_rank in zip(*steps, strict=True)]
        shown = [group.samples[0] for group in rollout.groups[: self.settings.tracking.report_samples]]
        return GeneratedRollout(rollout.metrics, shown, prompts_after), *shards

    def _schedule(self, iteration: int, rollout: Rollout) -> list[list[TrainShard]]:
        """The shards of each optimizer step, one a token rank."""
        if self.settings.rollout.save_debug_rollout_data is not None:
            save_rollout(self.settings.rollout.save_debug_rollout_data, iteration, rollout.groups)
        batches = convert(rollout.groups, loss=self.settings.loss, global_batch_size=self.settings.global_batch_size)
        return [
            schedule_step(
                batch,
                self.settings.token_ranks,
                self.settings.training,
                self.settings.parallel,
                self._samples_with_gradient(batch),
                watch_mass=self.settings.trains_policy(iteration) and self.canary.is_due(batch),
                share_prompts=not self.settings.megatron.mtp_heads,
            )
            for batch in batches
        ]

    def _samples_with_gradient(self, batch: TrainBatch) -> list[bool] | None:
        """None: all, because a loss beside the policy loss gives them one."""
        if self.settings.megatron.has_auxiliary_loss:
            return None
        return samples_with_gradient(self.settings.loss, batch.rewards)

    async def _collect(self, iteration: int) -> Rollout:
        saved = self.settings.rollout.load_debug_rollout_data
        if saved is not None:
            groups = load_rollout(saved, iteration)
            return Rollout(groups, rollout_metrics(groups, groups, 0, self.settings.reward.log_passrate))
        assert self.source is not None
        rollout = await self.source.collect(iteration)
        if not (self.settings.rollout.async_steps or self.settings.rollout.partial_rollout):
            return rollout  # by the weights that it trains
        return replace(rollout, metrics=rollout.metrics | staleness_metrics(rollout.groups, iteration))

    async def evaluate(self) -> dict[str, Metric]:
        """Metrics of every evaluation set under the engine's weights."""
        assert self.engine is not None and self.reward_function is not None
        async with self.order.alone():
            metrics, _ = await evaluate(
                self.eval_sets,
                self.engine,
                self.tokenizer,
                self.reward_function,
                self.settings.reward,
                self.settings.data.rollout_seed,
                self.generate_group,
            )
        return metrics

    async def update_weights(self, packed: list[ray.ObjectRef], version: int, after: int | None) -> None:
        """Give the engine the weights whose chunks ``packed`` refers to, when rollout ``after`` is whole."""
        await self.order.generated(after)
        if self.engine is not None:
            await self.engine.update_weights(StoredWeights(packed), version)
        if self.source is not None:
            self.source.weights_arrived(version)
        await self.order.arrived(version)

    async def release_memory(self) -> None:
        """Have the engines give their GPU memory up until new weights come."""
        assert isinstance(self.engine, ReleasesMemory), "arguments/offload_rules.py allows it for such engines only"
        await self.engine.release_memory()

    async def state(self, rollouts_done: int) -> dict[str, Any]:
        """The position in the prompts before rollout ``rollouts_done``, for a checkpoint; it may be under way."""
        return self.states.get(rollouts_done) or self._position()

    def _position(self) -> dict[str, Any]:
        if self.source is not None:
            return self.source.state()
        return {} if self.stream is None else self.stream.state()

    async def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's position."""
        if self.stream is not None and state:
            self.stream.restore(state)

    async def save_tokenizer(self, folder: str) -> None:
        """Add the tokenizer to a Hugging Face export."""
        self.tokenizer.save_pretrained(folder)

    @ray.method(concurrency_group=PULSE)
    async def pulse(self, seconds: float) -> int:
        """A heartbeat (``liveness.Workers``), on an event loop of its own."""
        await asyncio.sleep(seconds)
        return os.getpid()

    async def close(self) -> None:
        """Stop the servers that the engine has started. Nothing else is called after this."""
        if self.engine is not None:
            await self.engine.close()
