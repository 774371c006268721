"""The rollout side of a run in one Ray actor: prompts, engine, rewards, and the batches made of them."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
import torch
from transformers.utils.logging import disable_progress_bar

from miles.arguments.settings import Settings
from miles.batching.schedule import schedule_step
from miles.cluster.cpu_tuning import use_threads
from miles.cluster.session import Placement
from miles.data.prompts import load_prompts
from miles.data.stream import PromptStream
from miles.data.tokenizer import load_tokenizer
from miles.engine.base import Engine, WeightChunk
from miles.loss.canary import CanarySchedule
from miles.loss.policy_loss import samples_with_gradient
from miles.rewards.registry import get_reward_function
from miles.rollout.collect import Collector, Rollout
from miles.rollout.convert import convert
from miles.rollout.debug_data import load_rollout, save_rollout
from miles.rollout.eval_sets import load_eval_sets
from miles.rollout.evaluate import evaluate
from miles.rollout.rollout_metrics import rollout_metrics
from miles.sample import Sample
from miles.tracking.metrics import Metric
from miles.train_batch import TrainBatch
from miles.weight_sync.chunks import PackedChunk, unpack

T = TypeVar("T")


@dataclass(frozen=True)
class GeneratedRollout:
    """What the launcher learns of a rollout. The batches themselves stay in the object store."""

    shards_by_rank: list[ray.ObjectRef]  # each a list of TrainShard, one an optimizer step
    metrics: dict[str, Metric]
    samples: list[Sample]  # a few, for the report


class StoredWeights:
    """The chunks of one update, in the object store; each pass over them has one in memory at a time."""

    def __init__(self, packed: list[ray.ObjectRef]) -> None:
        self._packed = packed

    def __iter__(self) -> Iterator[WeightChunk]:
        for reference in self._packed:
            chunk: PackedChunk = ray.get(reference)
            yield unpack(chunk)


class RolloutWorker:
    """Generates, scores, converts and evaluates. Calls come one at a time; inside a call everything is concurrent."""

    def __init__(self, settings: Settings, placement: Placement) -> None:
        """Does nothing that can fail: Ray turns what a constructor raises into the death of the actor."""
        self.settings = settings
        self.placement = placement
        self.device = placement.device
        self.loop = asyncio.new_event_loop()
        self.canary = CanarySchedule(settings.loss)

    def prepare(self) -> int:
        """Load prompts, evaluation sets and the engine; returns the prompts of one epoch.

        Raises ``ValueError`` for a malformed row, an unknown reward and the like.
        """
        settings = self.settings
        assert settings.model.hf_checkpoint is not None
        disable_progress_bar()  # of loading weights: the launcher's own is the one on the screen
        # Weights are read from the object store's memory, which is read-only, and nothing writes there.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
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
        self.engine = self._build_engine() if settings.generates else None
        self.collector = self._build_collector()
        return num_prompts

    @property
    def _scores(self) -> bool:
        return self.settings.reward.rm_type is not None or self.settings.reward.custom_rm_path is not None

    def _build_engine(self) -> Engine:
        if self.settings.rollout.rollout_engine == "sglang":
            from miles.cluster.engine_servers import build_sglang_engine

            servers = build_sglang_engine(self.settings, self.placement)
            self._run(servers.start())
            return servers
        from miles.engine.torch_engine import TorchEngine

        assert self.settings.model.hf_checkpoint is not None
        dtype = torch.bfloat16 if self.settings.training.bf16 else torch.float32
        return TorchEngine(
            self.settings.model.hf_checkpoint, dtype, self.device, self.settings.rollout.torch_engine_max_batch_size
        )

    def _build_collector(self) -> Collector | None:
        if self.settings.rollout.load_debug_rollout_data is not None:
            return None
        assert self.stream is not None and self.engine is not None and self.reward_function is not None
        return Collector(
            self.stream,
            self.engine,
            self.tokenizer,
            self.reward_function,
            self.settings.rollout,
            self.settings.reward,
            self.settings.data.rollout_seed,
        )

    def generate(self, rollout_id: int) -> GeneratedRollout:
        """Collect rollout ``rollout_id``, and put one list of shards a token rank into the object store."""
        rollout = self._collect(rollout_id)
        if self.settings.rollout.save_debug_rollout_data is not None:
            save_rollout(self.settings.rollout.save_debug_rollout_data, rollout_id, rollout.groups)
        batches = convert(rollout.groups, loss=self.settings.loss, global_batch_size=self.settings.global_batch_size)
        steps = [
            schedule_step(
                batch,
                self.settings.token_ranks,
                self.settings.training,
                self.settings.parallel,
                self._samples_with_gradient(batch),
                watch_mass=self.canary.is_due(batch),
            )
            for batch in batches
        ]
        shards = [ray.put(list(of_rank)) for of_rank in zip(*steps, strict=True)]
        shown = self.settings.tracking.report_samples
        return GeneratedRollout(shards, rollout.metrics, [group.samples[0] for group in rollout.groups[:shown]])

    def _samples_with_gradient(self, batch: TrainBatch) -> list[bool] | None:
        """None: all, because a loss beside the policy loss gives them one."""
        if self.settings.megatron.has_auxiliary_loss:
            return None
        return samples_with_gradient(self.settings.loss, batch.rewards)

    def _collect(self, rollout_id: int) -> Rollout:
        saved = self.settings.rollout.load_debug_rollout_data
        if saved is not None:
            groups = load_rollout(saved, rollout_id)
            return Rollout(groups, rollout_metrics(groups, groups, 0, self.settings.reward.log_passrate))
        assert self.collector is not None
        return self._run(self.collector.collect(rollout_id))

    def evaluate(self) -> dict[str, Metric]:
        """Metrics of every evaluation set under the engine's weights."""
        assert self.engine is not None and self.reward_function is not None
        metrics, _ = self._run(
            evaluate(
                self.eval_sets,
                self.engine,
                self.tokenizer,
                self.reward_function,
                self.settings.reward,
                self.settings.data.rollout_seed,
            )
        )
        return metrics

    def update_weights(self, packed: list[ray.ObjectRef], version: int) -> None:
        """Give the engine the weights whose chunks ``packed`` refers to."""
        if self.engine is not None:
            self._run(self.engine.update_weights(StoredWeights(packed), version))

    def state(self) -> dict[str, Any]:
        """The position in the prompts, for a checkpoint."""
        return {} if self.stream is None else self.stream.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's position."""
        if self.stream is not None and state:
            self.stream.restore(state)

    def save_tokenizer(self, folder: str) -> None:
        """Add the tokenizer to a Hugging Face export."""
        self.tokenizer.save_pretrained(folder)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)
