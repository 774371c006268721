"""The processes of the trainer: ``TrainDriver`` starts one ``TrainActor`` per rank, and has every rank do the same.

The work of a rank is in miles/training; an actor holds its backend and trainer, and passes calls on. The launcher
imports this module too, so torch and its dependents are imported in the functions that use them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray

from miles.base.disk_faults import naming_disk
from miles.base.flags import count
from miles.base.host import GIB, resident_bytes
from miles.base.profiling import span
from miles.base.secrets import is_secret
from miles.base.storage import is_url
from miles.config.cluster import ClusterArguments
from miles.config.components import import_code
from miles.config.functions import flags_view
from miles.config.host_share import sharers_at_start, sharers_of_trainer
from miles.config.settings import Settings
from miles.engine.weight_sync.deltas import DeltaWriter
from miles.run.best_checkpoint import BestCheckpoint, remove_superseded
from miles.run.checkpoints import BackgroundSave
from miles.run.cpu_tuning import importing, use_threads
from miles.run.liveness import SAVING, WEIGHTS, ProfiledActor, Workers, with_heartbeat
from miles.run.object_store import UpdateWeights, store_packed, with_images
from miles.run.session import Placement
from miles.training import checkpoint_files
from miles.training.checkpoint_files import FileRecord, hash_files_of_rank
from miles.training.optimizer import be_deterministic
from miles.types.metrics import Metric
from miles.types.train_batch import TokenColumns, TrainShard
from miles.types.weights import pack

if TYPE_CHECKING:
    from miles.run.remote_checkpoints import Uploads
    from miles.training.backend import TrainBackend
    from miles.training.trainer import Trainer
    from miles.types.images import ImageTensors


MEMORY = "perf/trainer_memory_gib"
LAST_SAVE_SECONDS = 60.0  # for a checkpoint that is being written when the run fails
_INTACT = "earlier checkpoints are intact"
_FAILURES = (OSError, ray.exceptions.RayTaskError)  # of a write by the ranks, and by this process


@dataclass(frozen=True)
class TrainedIteration:
    """The results of an iteration's steps on one rank.

    Attributes:
        steps: The metrics of each step.
        tokens: Columns of the recorded samples on this rank, by step in the iteration and position in the step.
    """

    steps: list[dict[str, Metric]]
    tokens: dict[tuple[int, int], TokenColumns]


class TrainDriver:
    """All trainer ranks, as the loop sees them. ``build`` comes before everything else but ``start_building``."""

    def __init__(
        self, settings: Settings, placement: Placement, workers: Workers, uploads: Uploads | None = None
    ) -> None:
        """Start the processes of the ranks, and return before they have imported their modules.

        Args:
            settings: The run.
            placement: The devices of the ranks.
            workers: Watches their processes.
            uploads: Takes checkpoints and exports for URLs.
        """
        env, _ = _environment(settings.cluster)
        self.settings = settings
        self._uploads = uploads
        self._workers = workers
        self._saving: BackgroundSave | None = None
        self._building: list[ray.ObjectRef[Any]] = []
        self.actors: list[Any] = [
            with_heartbeat(TrainActor)
            .options(runtime_env={"env_vars": env} if env else None, **placement.trainer_options(rank))
            .remote(rank, settings, placement.device)
            for rank in range(settings.cluster.world_size)
        ]
        for rank, actor in enumerate(self.actors):
            workers.add(f"trainer rank {rank}", actor, preparing=actor.import_code.remote())

    def start_building(self, total_steps: int) -> None:
        """Have the ranks build their models, and return before they have; ``build`` waits for that."""
        address = self.actors[0].serve_store.remote()
        self._building = [actor.connect.remote(address, total_steps) for actor in self.actors]

    def build(self, total_steps: int) -> None:
        """Connect the ranks and build their models; ``total_steps`` are the optimizer steps of the run."""
        if not self._building:
            self.start_building(total_steps)
        self._workers.results(self._building)

    def train(self, shards_by_token_rank: list[Any], iteration: int) -> TrainedIteration:
        """Take one optimizer step for each shard in a rank's list; returns metrics and recorded tokens.

        Raises ``WriteFailed`` if the checkpoint that was being written has failed.
        """
        if self._saving is not None and self._saving.done() and self._saving.exception() is not None:
            self.settle_save()
        calls = [
            actor.train_stored.remote(*shards_by_token_rank[self.settings.dims.token_rank(rank)], iteration)
            for rank, actor in enumerate(self.actors)
        ]
        by_rank: list[TrainedIteration] = self._workers.results(calls)
        steps = by_rank[0].steps
        fullest = max(rank.steps[-1][MEMORY].value for rank in by_rank)
        steps[-1][MEMORY] = Metric(fullest)
        return TrainedIteration(steps, {place: tokens for rank in by_rank for place, tokens in rank.tokens.items()})

    def export_weights(self) -> UpdateWeights:
        """Return references to the packed chunks of the full weights, or to the changes since the last export."""
        exported: UpdateWeights = self._on_all("export_weights")[0]
        return replace(exported, trainer=self.actors[0])

    def offload(self) -> None:
        """Move weights and optimizer to host memory, and free the GPUs' memory."""
        self._on_all("offload")

    def onload(self) -> None:
        """Move them back."""
        self._on_all("onload")

    @property
    def profiled(self) -> list[Any]:
        """The actors that ``--profile`` records."""
        cluster = self.settings.cluster
        return [self.actors[rank] for rank in self.settings.profiling.ranks(cluster.world_size)]

    def save(self, iterations_done: int, state: dict[str, Any], best: BestCheckpoint | None = None) -> None:
        """Write a checkpoint after ``iterations_done`` iterations; it appears in ``--save`` whole or not at all.

        With ``--async-save`` this returns when the checkpoint is copied into memory, and ``settle_save`` waits for its
        files. A save that is in progress is waited for first.

        Args:
            iterations_done: Names the checkpoint.
            state: The launcher's own, plain JSON.
            best: Its record for ``--save-best``, if it is the best so far.

        Raises:
            WriteFailed: This checkpoint, or the one before it, cannot be written; names the disk if that is the cause.
        """
        self.settle_save()
        section = self.settings.checkpoint
        assert section.save is not None
        root = section.local(section.save).absolute()
        uploads = self._uploads if is_url(section.save) else None
        if uploads is not None:
            uploads.make_room(checkpoint_files.checkpoint_path(root, iterations_done))
        staged = checkpoint_files.staging_path(root, iterations_done)
        what = f"--save {section.save}: the checkpoint after {iterations_done} iterations"
        naming = partial(naming_disk, staged, staged, what, _INTACT, _FAILURES)

        def publish(by_rank: list[dict[str, FileRecord]]) -> None:
            records = {name: record for of_rank in by_rank for name, record in of_rank.items()}
            saved = checkpoint_files.publish(root, iterations_done, records)
            if uploads is None:
                remove_superseded(saved, self.settings, best)
            else:
                uploads.add_checkpoint(saved, best)

        with naming():
            folder = checkpoint_files.staging(root, iterations_done)
            if not section.async_save:
                publish(self._on_all("save", folder, state))
                return
            self._on_all("stage", folder, state)
        self._saving = BackgroundSave([actor.written.remote() for actor in self.actors], publish, naming)

    def save_progress(self) -> str | None:
        """Say how much of a checkpoint is on the disk while it is written, or how many uploads are left; else None."""
        save = self.settings.checkpoint.save
        written = None if save is None else checkpoint_files.bytes_being_written(self.settings.checkpoint.local(save))
        if written is not None:
            return f"{written / 1e9:.2f} GB"
        left = 0 if self._uploads is None else self._uploads.left
        return f"{count(left, 'upload')} left" if left else None

    def settle_save(self) -> None:
        """Wait for a checkpoint that is being written. Raises ``WriteFailed`` as ``save`` does."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with suppress(OSError, ray.exceptions.RayTaskError):  # its result names the disk
                self._workers.results(saving.calls)
            saving.result()

    def upload_export(self, folder: Path, url: str) -> None:
        """Upload an export during the run, then remove it from this machine."""
        assert self._uploads is not None, "a run with a URL uploads"
        self._uploads.add_export(folder, url)

    def settle_uploads(self) -> None:
        """Wait until checkpoints and exports are uploaded. Raises ``WriteFailed`` if one cannot be."""
        if self._uploads is not None:
            self._uploads.settle()

    def resume(self) -> dict[str, Any] | None:
        """Restore every rank from ``--load``, a checkpoint or a folder of them; returns the launcher's state.

        None, and the run starts at its first iteration, if there is no checkpoint, or under ``--finetune``, which takes
        the weights only.
        """
        section = self.settings.checkpoint
        folder = checkpoint_files.at(section.local(section.load)) if section.load is not None else None
        if folder is None:
            return None
        state = self._on_all("load", folder.absolute())[0]
        return None if section.finetune else state

    def export_hf(self, folder: Path) -> None:
        """Write the Hugging Face export into ``folder``. Raises ``WriteFailed`` as ``save`` does."""
        folder = folder.absolute()
        what = f"--save-hf {self.settings.checkpoint.save_hf}: the export"
        with naming_disk(folder, folder, what, _INTACT, _FAILURES):
            self._on_all("export_hf", folder)

    def stop(self) -> None:
        """End every rank, whatever it is doing."""
        for actor in self.actors:
            self._workers.end(actor)

    def __enter__(self) -> TrainDriver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._saving is not None and kind is not None and issubclass(kind, Exception):
            wait([self._saving], LAST_SAVE_SECONDS)  # useful whatever failed; a signal does not wait
        self.stop()

    def _on_all(self, verb: str, *arguments: Any) -> list[Any]:
        return self._workers.results([getattr(actor, verb).remote(*arguments) for actor in self.actors])


class TrainActor(ProfiledActor):
    """One trainer rank in a Ray actor."""

    backend: TrainBackend  # from ``connect`` on, as ``trainer``
    trainer: Trainer
    _written: Future[dict[str, FileRecord]]  # from ``stage`` on

    def __init__(self, rank: int, settings: Settings, device: str) -> None:
        with importing():
            import torch
            from transformers.utils.logging import disable_progress_bar

        super().__init__(f"trainer rank {rank}")
        _, secrets = _environment(settings.cluster)
        os.environ.update(secrets)
        self.rank = rank
        self.settings = settings
        self.device = torch.device(device)
        self.deltas = DeltaWriter(settings.weights_folder) if settings.sends_deltas else None
        if settings.training.deterministic_mode:
            be_deterministic()
        disable_progress_bar()

    def import_code(self) -> None:
        """Import the modules that ``connect`` needs, while the rollout worker starts. ``connect`` reports a failure."""
        with importing():
            import miles.training.trainer  # noqa: F401

            import_code(self.settings.backend, self.device)

    def serve_store(self) -> tuple[str, int]:
        """Open the rendezvous on a free port of this node's address; returns both. Rank 0 only."""
        from miles.engine.weight_sync.broadcast import serve_store

        host = ray.util.get_node_ip_address()
        self.store = serve_store(host, self._timeout)
        return host, self.store.port

    @property
    def _timeout(self) -> timedelta:
        return timedelta(minutes=self.settings.cluster.distributed_timeout_minutes)

    def connect(self, address: tuple[str, int], total_steps: int) -> None:
        """Join the process group, and build the backend and the trainer."""
        import torch
        import torch.distributed as dist

        from miles.engine.weight_sync.broadcast import TCPStore

        # Here, in the thread that computes: some libraries keep the number for each thread.
        use_threads(self.device.type, sharers_at_start(self.settings))
        timeout = self._timeout
        if self.rank != 0:
            self.store = TCPStore(*address, is_master=False, timeout=timeout)
        if self.device.type == "cuda":  # before NCCL, which works on the current device
            number = 0 if "CUDA_VISIBLE_DEVICES" in os.environ else int(ray.get_gpu_ids()[0])
            self.device = torch.device("cuda", number)
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            {"cpu": "gloo", "cuda": "nccl"}[self.device.type],
            store=self.store,
            rank=self.rank,
            world_size=self.settings.cluster.world_size,
            timeout=timeout,
        )
        self.build(total_steps)
        use_threads(self.device.type, sharers_of_trainer(self.settings))

    def build(self, total_steps: int) -> None:
        """Build the backend and the trainer, in the process group that there is."""
        from miles.training.backend import build_backend
        from miles.training.trainer import Trainer

        self.backend = build_backend(self.settings, self.device, total_steps)
        passes = self.settings.training.ppo_epochs
        ranks = self.settings.dims.token_ranks
        self.trainer = Trainer(self.backend, self.settings.loss, ranks, passes, flags_view(self.settings))

    def train(self, shards: Sequence[TrainShard], iteration: int) -> TrainedIteration:
        """Take one optimizer step per shard, of policy and critic or of the critic alone; then update the reference.

        Which of them is due in ``iteration``, the settings say.

        The metrics of the last step have the memory of this rank, in GiB: on a GPU torch's peak allocation there
        meanwhile, on CPU the process's memory afterwards.
        """
        import torch

        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with span("train"):
            steps = self.trainer.train(shards, self.settings.trains_policy(iteration), iteration)
        if self.settings.refreshes_reference(iteration):
            started = time.perf_counter()
            with span("update the reference"):
                self.backend.refresh_reference()
            steps[-1]["time/ref_update"] = Metric(time.perf_counter() - started)
        used = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else resident_bytes()
        steps[-1][MEMORY] = Metric(used / GIB)
        return TrainedIteration(steps, self.trainer.recorder.read())

    def train_stored(
        self, images: Sequence[ImageTensors], shards: Sequence[TrainShard], iteration: int
    ) -> TrainedIteration:
        """As ``train``, with shards whose images are stored apart."""
        return self.train(with_images(shards, images), iteration)

    def export_weights(self) -> UpdateWeights:
        """Gather the weights on all ranks; rank 0 returns references to packed chunks in the object store.

        With ``--update-weight-transfer-mode disk-delta`` it writes the changes, and returns them, if it can.
        """
        with span("export weights"):
            chunks = self.backend.export_weights()
            if self.rank == 0 and self.deltas is not None:
                offer = self.deltas.update(chunks)
                return UpdateWeights(store_packed(self.deltas.newest()) if offer is None else [], offer)
            if self.rank == 0:
                return UpdateWeights(store_packed(map(pack, chunks)))
            for _ in chunks:  # take part in the gathering
                continue
        return UpdateWeights([])

    @ray.method(concurrency_group=WEIGHTS)
    def whole_weights(self, identity: str) -> list[ray.ObjectRef[Any]]:
        """Return references to all weights of one of the last two exports, for those who cannot follow its delta."""
        assert self.deltas is not None, "only deltas are refused"
        return store_packed(self.deltas.whole(identity))

    def offload(self) -> None:
        """Move weights and optimizer to host memory."""
        self.backend.offload()

    def onload(self) -> None:
        """Move them back."""
        self.backend.onload()

    def save(self, folder: Path, state: dict[str, Any]) -> dict[str, FileRecord]:
        """Write this rank's part of a checkpoint; returns size and hash of its files."""
        self.backend.save(folder, self._state_with(state))
        return hash_files_of_rank(folder, self.rank)

    def stage(self, folder: Path, state: dict[str, Any]) -> None:
        """Copy this rank's part of a checkpoint into memory, and have a thread write it; ``written`` waits for that."""
        from miles.training.checkpoint_io import StagedFiles

        staged = StagedFiles()
        self.backend.save(folder, self._state_with(state), staged)

        def write() -> dict[str, FileRecord]:
            staged.write()
            return hash_files_of_rank(folder, self.rank)

        pool = ThreadPoolExecutor(1, thread_name_prefix="write-checkpoint")
        self._written = pool.submit(write)
        pool.shutdown(wait=False)

    def _state_with(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the launcher's state with the state that this rank keeps alongside its backend."""
        return state | {"coefficients": self.trainer.coefficients.state()}

    @ray.method(concurrency_group=SAVING)
    def written(self) -> dict[str, FileRecord]:
        """Wait until the staged files are on the disk; returns their sizes and hashes. Raises ``OSError``."""
        return self._written.result()

    def load(self, folder: Path) -> dict[str, Any]:
        """Read a checkpoint as the flags say; returns the launcher's state."""
        section = self.settings.checkpoint
        with_optimizer = not (section.no_load_optim or section.finetune)
        with_random_state = not (section.no_load_rng or section.finetune)
        state = self.backend.load(folder, with_optimizer, with_random_state, reference=not section.finetune)
        if not section.finetune:
            self.trainer.restore_coefficients(state.get("coefficients", {}))  # absent in earlier checkpoints
        return state

    def export_hf(self, folder: Path) -> None:
        """Write the Hugging Face export."""
        self.backend.export_hf(folder)


def _environment(cluster: ClusterArguments) -> tuple[dict[str, str], dict[str, str]]:
    """Return ``--train-env-vars`` as variables that Ray sets, and as secrets, which Ray would write to its logs."""
    variables = cluster.trainer_environment
    secrets = {name: value for name, value in variables.items() if is_secret(name)}
    return {name: value for name, value in variables.items() if name not in secrets}, secrets
