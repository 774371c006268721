"""All trainer ranks as one thing to talk to."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from miles.arguments.settings import Settings
from miles.cluster.liveness import Workers, with_pulse
from miles.cluster.session import Placement
from miles.cluster.train_actor import TrainActor
from miles.metrics import Metric
from miles.training import checkpoint_folder


class TrainDriver:
    """Starts one actor a rank, and has every rank do the same thing."""

    def __init__(self, settings: Settings, placement: Placement, workers: Workers, total_steps: int) -> None:
        env = json.loads(settings.cluster.train_env_vars or "{}")
        self.settings = settings
        self._workers = workers
        self.actors: list[Any] = [
            with_pulse(TrainActor)
            .options(runtime_env={"env_vars": env} if env else None, **placement.trainer_options(rank))
            .remote(rank, settings, placement.device)
            for rank in range(settings.cluster.world_size)
        ]
        for rank, actor in enumerate(self.actors):
            workers.add(f"trainer rank {rank}", actor)
        try:
            address = workers.result(self.actors[0].serve_store.remote())
            self._on_all("connect", address, total_steps)
        except BaseException:
            self.stop()
            raise

    def train(self, shards_by_token_rank: list[ray.ObjectRef], iteration: int) -> list[dict[str, Metric]]:
        """One optimizer step for each shard in a rank's list; returns each step's metrics."""
        trains_policy = self.settings.trains_policy(iteration)
        calls = [
            actor.train.remote(shards_by_token_rank[self.settings.token_rank(rank)], trains_policy)
            for rank, actor in enumerate(self.actors)
        ]
        return self._workers.results(calls)[0]

    def export_weights(self) -> list[ray.ObjectRef]:
        """References to the packed chunks of the full weights."""
        return self._on_all("export_weights")[0]

    def offload(self) -> None:
        """Weights and optimizer go to host memory, and the GPUs' memory is free."""
        self._on_all("offload")

    def onload(self) -> None:
        """They come back."""
        self._on_all("onload")

    def save(self, rollout: int, state: dict[str, Any]) -> Path:
        """Checkpoint after ``rollout`` rollouts; it appears in ``--save`` whole or not at all."""
        assert self.settings.checkpoint.save is not None
        root = Path(self.settings.checkpoint.save).absolute()
        folder = checkpoint_folder.staging(root, rollout)
        self._on_all("save", folder, state)
        return checkpoint_folder.publish(root, rollout)

    def resume(self) -> dict[str, Any] | None:
        """Restore every rank from ``--load``, a checkpoint or a folder of them; returns the launcher's state.

        None, and the run starts at its first rollout, when there is no checkpoint, or under ``--finetune``, which takes
        the weights only.
        """
        given = self.settings.checkpoint
        folder = checkpoint_folder.at(Path(given.load)) if given.load is not None else None
        if folder is None:
            if given.load is not None and given.finetune:
                raise ValueError(f"--load {given.load}: --finetune wants the weights of a checkpoint; there is none")
            return None
        state = self._on_all("load", folder.absolute())[0]
        return None if given.finetune else state

    def export_hf(self, folder: Path) -> None:
        """Write the Hugging Face export into ``folder``."""
        self._on_all("export_hf", folder.absolute())

    def stop(self) -> None:
        """End every rank, whatever it is doing."""
        for actor in self.actors:
            self._workers.end(actor)

    def __enter__(self) -> TrainDriver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _on_all(self, verb: str, *arguments: Any) -> list[Any]:
        return self._workers.results([getattr(actor, verb).remote(*arguments) for actor in self.actors])
