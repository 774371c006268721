"""Which side of a run gives its GPU memory up while the other works, on GPUs that they share (``--colocate``)."""

from __future__ import annotations

from dataclasses import dataclass

from miles.arguments.settings import Settings
from miles.flags import flag_name, refuse, refuse_ignored

FLAGS = ("offload_train", "offload_rollout", "no_offload_train", "no_offload_rollout")


@dataclass(frozen=True)
class Offload:
    """``train``: weights and optimizer wait on the host while rollouts are generated; ``rollout``: the engines' memory
    is released while the trainer works."""

    train: bool
    rollout: bool


def check_offload(settings: Settings) -> None:
    """No offload where nothing is shared, none of what cannot be offloaded, and no contradiction."""
    cluster = settings.cluster
    if not cluster.colocate:
        refuse_ignored(cluster, FLAGS, "without --colocate", "add that switch")
    elif settings.num_engines == 0:
        why = "without SGLang servers of this run's own"
        refuse_ignored(cluster, FLAGS, why, "use --rollout-engine sglang without --rollout-external")
    for side in ("train", "rollout"):
        if getattr(cluster, f"offload_{side}") and getattr(cluster, f"no_offload_{side}"):
            refuse(f"offload_{side}", True, f"contradicts {flag_name(f'no_offload_{side}')}", "give one of them")
    if cluster.offload_train and settings.training.train_backend != "fsdp":
        backend = f"--train-backend {settings.training.train_backend} cannot in this version"
        refuse("offload_train", True, backend, "use --train-backend fsdp, or give --no-offload-train")
    if cluster.device == "cpu":
        offload_on(settings, "cpu")


def offload_on(settings: Settings, device: str) -> Offload:
    """What is offloaded on ``device`` (cpu or cuda). On GPUs, by default, whatever can be that shares them.

    Raises ``ValueError`` for an offload that is asked for on CPU.
    """
    cluster = settings.cluster
    if device == "cpu":
        for side in ("offload_train", "offload_rollout"):
            if getattr(cluster, side):
                refuse(side, True, "frees GPU memory, and this run is on CPU", f"drop {flag_name(side)}")
        return Offload(train=False, rollout=False)
    shares = cluster.colocate and settings.num_engines > 0
    can_train = settings.training.train_backend == "fsdp"
    return Offload(
        train=shares and can_train and not cluster.no_offload_train, rollout=shares and not cluster.no_offload_rollout
    )
