"""Set up the processes of a run: nodes, devices, Ray, and who shares a GPU with whom."""

import json
import re
from dataclasses import dataclass
from typing import Literal, Optional

from miles.base.flags import Errors, count, flag, flag_name

MOST_DEVICES = 100_000  # of trainer or engines: the groups of ranks are listed, to check them


@dataclass(frozen=True)
class ClusterArguments:
    """cluster: processes, devices and Ray."""

    ray_address: Optional[str] = flag(
        None, "address of a running Ray cluster; default: RAY_ADDRESS in the environment, or else start a local Ray"
    )
    device: Literal["auto", "cpu", "cuda"] = flag(
        "auto", "device of the trainer and the engine; auto is cuda if this host, or the joined Ray cluster, has a GPU"
    )
    actor_num_nodes: int = flag(1, "nodes of the trainer", within="[1, 100000]")
    actor_num_gpus_per_node: int = flag(
        8, "trainer ranks per node: GPUs; on CPU, processes (default there: one for two cores)", within="[1, 100000]"
    )
    rollout_num_gpus: Optional[int] = flag(
        None,
        "devices of the rollout engines, without --colocate; default: as many as one engine has",
        needs="no --colocate, engines on several devices, no --rollout-external",
        within="[1, 100000]",
    )
    colocate: bool = flag(False, "let the trainer and the engines share their devices")
    offload_train: bool = flag(
        False,
        "with --colocate on GPUs: keep the trainer in host memory while engines generate (the default there)",
        needs="shared devices, no --device cpu",
    )
    offload_rollout: bool = flag(
        False,
        "with --colocate on GPUs: release the engines' memory while the trainer works (the default there)",
        needs="shared devices, no --device cpu",
    )
    no_offload_train: bool = flag(False, "with --colocate: keep the trainer on the GPU", needs="shared devices")
    no_offload_rollout: bool = flag(False, "with --colocate: let the engines keep their memory", needs="shared devices")
    distributed_timeout_minutes: int = flag(10, "minutes after which a collective operation fails", at_least=1)
    worker_timeout: float = flag(
        300.0,
        "seconds without a response after which a worker process counts as lost; so does an engine without "
        "--use-fault-tolerance",
        above=0,
    )
    wait_timeout: float = flag(
        21600.0,
        "seconds that one call of a worker may take (an iteration's samples, its training, a checkpoint) before the "
        "stacks of all processes are written and the run ends; 0 is no limit",
        at_least=0,
    )
    stop_timeout: float = flag(
        120.0,
        "seconds after Ctrl-C or another signal that stops the run where an iteration is finished and saved",
        above=0,
    )
    max_restarts: int = flag(
        0,
        "times that a run restarts from its last checkpoint in --save after a worker process has failed",
        needs="--save",
        at_least=0,
    )
    train_env_vars: Optional[str] = flag(
        None, "JSON object of environment variables for the trainer processes", has_lines=True
    )

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def trainer_environment(self) -> dict[str, str]:
        """The environment variables of ``--train-env-vars``. Valid after validation."""
        variables: dict[str, str] = {} if self.train_env_vars is None else json.loads(self.train_env_vars)
        return variables


@dataclass(frozen=True)
class Offload:
    """Say which of trainer and engines releases its GPU memory while the other works, on GPUs that both share.

    Attributes:
        train: Weights and optimizer are in host memory while samples are generated.
        rollout: The engines' memory is released while the trainer works.
    """

    train: bool
    rollout: bool


def is_cluster_address(address: str) -> bool:
    """Return whether a run can join a Ray cluster at this address: auto, or HOST:PORT."""
    return address == "auto" or re.fullmatch(r"[^\s/]+:\d{1,5}", address, re.ASCII) is not None


def check_cluster(cluster: ClusterArguments, errors: Errors) -> None:
    """Check counts, time limits and the environment of the trainer."""
    if errors.none_about("actor_num_nodes", "actor_num_gpus_per_node") and cluster.world_size > MOST_DEVICES:
        rule = f"makes {cluster.world_size} trainer ranks with --actor-num-nodes {cluster.actor_num_nodes}"
        what_to_do = f"give sizes of at most {MOST_DEVICES} ranks"
        errors.refuse("actor_num_gpus_per_node", cluster.actor_num_gpus_per_node, rule, what_to_do)
    address = cluster.ray_address
    if address is not None and not is_cluster_address(address):
        rule, what_to_do = "is no address of a Ray cluster", "give HOST:PORT, or auto for the one of this host"
        of_cluster = "give HOST:PORT of the cluster itself, or auto; or start the run with ray job submit"
        if address.startswith(("http://", "https://")):
            rule, what_to_do = "is the address of Ray's dashboard, which takes jobs", of_cluster
        elif address.startswith("ray://"):
            rule, what_to_do = "is an address of Ray Client, which runs nothing on this machine", of_cluster
        elif address == "local":
            rule = "starts a Ray that nothing would end with the run"
            what_to_do = "drop it: a run without an address starts its own local Ray"
        errors.refuse("ray_address", address, f"{rule} (given here, or as RAY_ADDRESS)", what_to_do)
    for name, value in errors.json_object("train_env_vars", cluster.train_env_vars).items():
        if not isinstance(value, str):
            rule = f"the value of {name} is not a string, and environment variables are strings"
            errors.refuse("train_env_vars", cluster.train_env_vars, rule, f'write "{name}": "…", with quotes')
        elif not name or "=" in name or "\0" in name + value:
            rule = "a name is empty or has =, or a name or value has a zero byte, which no environment variable has"
            errors.refuse("train_env_vars", cluster.train_env_vars, rule, 'write {"NAME": "value"}')


def check_offload(cluster: ClusterArguments, errors: Errors) -> None:
    """Check that offload flags do not contradict each other."""
    for side in ("train", "rollout"):
        if getattr(cluster, f"offload_{side}") and getattr(cluster, f"no_offload_{side}"):
            rule = f"contradicts {flag_name(f'no_offload_{side}')}"
            errors.refuse(f"offload_{side}", True, rule, "give one of them")


def explain_cluster(cluster: ClusterArguments, engines: str, train_backend: str | None) -> str:
    """Describe the processes of the run in one line.

    Args:
        cluster: The section.
        engines: The engines in words; empty if nothing is generated.
        train_backend: The value of ``--train-backend``; None in a run without a trainer.
    """
    ray = f"joins the Ray cluster at {cluster.ray_address}" if cluster.ray_address else "starts a local Ray"
    rollout = f"1 rollout actor with {engines}" if engines else "1 rollout actor, without an engine"
    if train_backend is None:
        return f"{ray}: {rollout}, no trainer; device: {cluster.device}"
    trainer = f"{count(cluster.world_size, 'trainer rank')} on {count(cluster.actor_num_nodes, 'node')}"
    shared = ", on shared devices" if cluster.colocate else ""
    return f"{ray}: {rollout}, {trainer} with {train_backend}{shared}; device: {cluster.device}"
