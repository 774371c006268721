"""Where the processes of a run stand."""

from dataclasses import dataclass
from typing import Literal, Optional

from miles.flags import flag


@dataclass(frozen=True)
class ClusterArguments:
    """cluster: processes, devices and Ray."""

    ray_address: Optional[str] = flag(None, "address of a running Ray cluster; without it a local Ray is started")
    device: Literal["auto", "cpu", "cuda"] = flag(
        "auto", "device of trainer and engine; auto is cuda where there is one"
    )
    actor_num_nodes: int = flag(1, "nodes given to the trainer")
    actor_num_gpus_per_node: int = flag(8, "trainer ranks per node: GPUs, or processes on CPU")
    rollout_num_gpus: Optional[int] = flag(
        None, "devices given to the rollout engines (ignored with --colocate); default: those of one engine"
    )
    colocate: bool = flag(False, "trainer and rollout share their devices")
    offload_train: bool = flag(
        False, "with --colocate on GPUs: the trainer waits in host memory while engines generate (the default there)"
    )
    offload_rollout: bool = flag(
        False, "with --colocate on GPUs: engines release their memory while the trainer works (the default there)"
    )
    no_offload_train: bool = flag(False, "with --colocate: the trainer stays on the GPU")
    no_offload_rollout: bool = flag(False, "with --colocate: engines keep their memory")
    distributed_timeout_minutes: int = flag(10, "minutes after which a collective operation gives up")
    worker_timeout: float = flag(
        300.0,
        "seconds without a sign of life after which a worker process counts as lost, and so does an engine without "
        "--use-fault-tolerance",
    )
    max_restarts: int = flag(
        0, "times that a run whose worker process fails starts again from its last checkpoint in --save"
    )
    train_env_vars: Optional[str] = flag(None, "JSON object of environment variables for the trainer processes")

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node
