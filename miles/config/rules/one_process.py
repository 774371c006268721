"""What a run in one process without Ray cannot do (run/one_process/sides.py)."""

from __future__ import annotations

from miles.base.flags import Errors
from miles.config.components import TRAIN_BACKENDS, names_with, train_backend_spec
from miles.config.host_share import is_on_cpu
from miles.config.settings import Settings


def check_one_process(settings: Settings) -> None:
    """Refuse a run that needs more than one process.

    Raises:
        FlagError: With one message per flag.
    """
    cluster, checkpoint, errors = settings.cluster, settings.checkpoint, Errors()
    where = "a run in one process"
    if not is_on_cpu(settings):
        errors.add(f"--device {cluster.device}: {where} computes on CPU; give --device cpu")
    if settings.trains and cluster.world_size > 1:
        ranks = cluster.world_size
        errors.add(f"--actor-num-gpus-per-node: {where} has one trainer rank, not {ranks}; give 1, on one node")
    if not settings.trains:
        errors.add(f"--debug-rollout-only: {where} trains; drop it")
    if settings.num_engines:
        errors.add(f"--rollout-engine {settings.rollout.rollout_engine}: {where} starts no servers; give torch")
    if settings.rollout.num_rollout_workers > 1:
        number = settings.rollout.num_rollout_workers
        errors.add(f"--num-rollout-workers {number}: {where} has no further processes; drop it")
    backend = settings.training.train_backend
    if not train_backend_spec(backend).trains_without_ray:
        able = names_with(TRAIN_BACKENDS, "trains_without_ray")
        errors.add(f"--train-backend {backend}: {where} trains with {able}; give {able}")
    if cluster.ray_address:
        errors.add(f"--ray-address {cluster.ray_address}: {where} uses no Ray; drop it")
    if settings.sends_deltas:
        errors.add(f"--update-weight-transfer-mode: {where} passes whole weights; drop it")
    for flag, folder in (("--save", checkpoint.save), ("--load", checkpoint.load)):
        if folder is not None:
            errors.add(f"{flag} {folder}: {where} neither saves nor resumes; drop {flag}")
    if checkpoint.urls:
        errors.add(f"--save-hf {checkpoint.save_hf}: {where} uploads nothing; give a folder")
    if settings.profiling.is_on:
        errors.add(f"--profile: {where} is not recorded; drop it")
    errors.raise_if_any()
