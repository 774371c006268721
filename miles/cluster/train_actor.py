"""One trainer rank in a Ray actor."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from miles.arguments.settings import Settings
from miles.cluster.cpu_tuning import use_threads
from miles.cluster.liveness import PULSE
from miles.metrics import Metric
from miles.train_batch import TrainShard
from miles.training.advantages import AdvantageEstimator
from miles.training.backend import TrainBackend
from miles.training.trainer import train_rollout
from miles.weights import pack


class TrainActor:
    """Holds a ``TrainBackend`` and does what the train group tells every rank."""

    def __init__(self, rank: int, settings: Settings, device: str) -> None:
        self.rank = rank
        self.settings = settings
        self.device = torch.device(device)
        self.backend: TrainBackend | None = None
        disable_progress_bar()

    def serve_store(self) -> tuple[str, int]:
        """Rank 0: open the rendezvous on a free port; returns its address."""
        host = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def connect(self, address: tuple[str, int], total_steps: int) -> None:
        """Join the process group and build the backend."""
        # Here, in the thread that computes: some libraries keep the number for each thread.
        generates_meanwhile = self.settings.rollout.async_steps > 0
        use_threads(self.device.type, self.settings.cluster.actor_num_gpus_per_node + generates_meanwhile)
        timeout = timedelta(minutes=self.settings.cluster.distributed_timeout_minutes)
        if self.rank != 0:
            self.store = dist.TCPStore(*address, is_master=False, timeout=timeout)
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.settings.cluster.world_size,
            timeout=timeout,
        )
        self.backend = _build_backend(self.settings, self.device, total_steps)

    def train(self, shards: Sequence[TrainShard], trains_policy: bool) -> list[dict[str, Metric]]:
        """One optimizer step a shard, of policy and critic or of the critic alone; the same metrics on every rank."""
        backend, loss = self._backend, self.settings.loss
        estimator = None
        if loss.estimates_by_token:
            estimator = AdvantageEstimator(loss, backend.token_group, backend.critic)
        ranks = self.settings.token_ranks
        return train_rollout(backend, shards, loss.needs_reference, ranks, estimator, trains_policy)

    def export_weights(self) -> list[ray.ObjectRef]:
        """Gather the weights on all ranks; rank 0 returns references to packed chunks in the object store."""
        chunks = self._backend.export_weights()
        if self.rank == 0:
            return [ray.put(pack(chunk)) for chunk in chunks]
        for _ in chunks:  # take part in the gathering
            continue
        return []

    def offload(self) -> None:
        """As the backend does."""
        self._backend.offload()

    def onload(self) -> None:
        """As the backend does."""
        self._backend.onload()

    def save(self, folder: Path, state: dict[str, Any]) -> None:
        """Write this rank's part of a checkpoint."""
        self._backend.save(folder, state)

    def load(self, folder: Path) -> dict[str, Any]:
        """Read a checkpoint as the flags say; returns the launcher's state."""
        given = self.settings.checkpoint
        with_optimizer = not (given.no_load_optim or given.finetune)
        return self._backend.load(folder, optimizer=with_optimizer, rng=not (given.no_load_rng or given.finetune))

    def export_hf(self, folder: Path) -> None:
        """Write the Hugging Face export."""
        self._backend.export_hf(folder)

    @ray.method(concurrency_group=PULSE)
    def pulse(self, seconds: float) -> int:
        """A heartbeat (``liveness.Workers``)."""
        time.sleep(seconds)
        return os.getpid()

    @property
    def _backend(self) -> TrainBackend:
        assert self.backend is not None, "connect() comes first"
        return self.backend


def _build_backend(settings: Settings, device: torch.device, total_steps: int) -> TrainBackend:
    if device.type == "cuda":
        device = torch.device("cuda", 0 if "CUDA_VISIBLE_DEVICES" in os.environ else int(ray.get_gpu_ids()[0]))
        torch.cuda.set_device(device)
    if settings.training.train_backend == "fsdp":
        from miles.training.fsdp.backend import FsdpBackend

        return FsdpBackend(settings, device, total_steps)
    if device.type == "cpu":
        from miles.training.megatron.cpu_support import support_cpu

        support_cpu()
    from miles.training.megatron.backend import MegatronBackend

    return MegatronBackend(settings, device, total_steps)
