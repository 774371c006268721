"""Choose the servers that generate: how many, their requests, their weights, and what happens when one fails."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, Optional, assert_never

from miles.base.flags import count, flag
from miles.config.cluster import ClusterArguments

DEVICES_OF_A_NODE = 8

_of_servers = partial(flag, needs="servers")


@dataclass(frozen=True)
class SglangArguments:
    """sglang: generation servers. Further `--sglang-NAME` and `--router-NAME` flags go to them as `--NAME`."""

    rollout_num_gpus_per_engine: int = _of_servers(1, "devices of one engine: its tensor-parallel size", at_least=1)
    num_gpus_per_node: Optional[int] = flag(
        None,
        "devices of a node, for engines that are larger: they span as many nodes as they need; default: "
        "--actor-num-gpus-per-node with --colocate, else 8",
        needs="servers, engines larger than a node",
        at_least=1,
        metavar="N",
    )
    sglang_server_concurrency: int = _of_servers(
        512, "maximum requests in flight at one engine; further ones wait here", at_least=1
    )
    rollout_external: bool = _of_servers(False, "use engines that are running already instead of starting them")
    rollout_external_engine_addrs: Optional[tuple[str, ...]] = flag(
        None, "their addresses, as HOST:PORT", needs="servers, --rollout-external", nargs="+", type=str, metavar="ADDR"
    )
    update_weight_transfer_mode: Literal["disk", "disk-delta", "broadcast", "ipc"] = flag(
        "broadcast",
        "how new weights reach the engines: files, files of what has changed (also for the torch engine), a broadcast "
        "over gloo, or the shared memory of one host",
        needs="servers or deltas",
    )
    update_weight_disk_dir: Optional[str] = flag(
        None,
        "folder for --update-weight-transfer-mode disk and disk-delta, which trainer and engines share; default: "
        "weights/ in --output-dir",
        needs="servers or deltas, files of weights",
        file="new folder",
    )
    update_weight_copy_dir: Optional[str] = flag(
        None,
        "folder of the copy of the weights that each engine's host keeps for disk-delta, such as /dev/shm; default: "
        "the folder of temporary files",
        needs="servers or deltas, --update-weight-transfer-mode disk-delta",
        file="new folder",
    )
    pause_generation_mode: Literal["retract", "in_place", "abort"] = _of_servers(
        "retract",
        "requests in flight when weights change: retract recomputes their cache, in_place continues with the old one, "
        "abort is retract, because it is allowed only without --fully-async, where none are in flight",
    )
    check_weight_update_equal: bool = _of_servers(
        False,
        "after each update, compare the checksum of every tensor with the same weights loaded from a file",
    )
    use_fault_tolerance: bool = flag(
        False, "restart engines, and the rollout actor, when they fail, instead of stopping the run"
    )
    rollout_health_check_interval: float = _of_servers(30.0, "seconds between health checks of an engine", above=0)
    rollout_health_check_timeout: float = _of_servers(
        30.0, "seconds after which an engine that does not answer has failed", above=0
    )
    engine_log_max_mb: float = _of_servers(
        100.0,
        "bound of engines/*.log in --output-dir; a full file becomes *.log.1, instead of the one before",
        above=0,
    )

    def per_node(self, cluster: ClusterArguments) -> int:
        """Return the devices of a node that engines can have. With ``--colocate`` they are the trainer's devices."""
        return cluster.actor_num_gpus_per_node if cluster.colocate else self.num_gpus_per_node or DEVICES_OF_A_NODE

    @property
    def writes_deltas(self) -> bool:
        """Whether files of what has changed in the weights are written for the engines."""
        return self.update_weight_transfer_mode == "disk-delta"

    @property
    def writes_weights(self) -> bool:
        """Whether files of weights, or of what has changed in them, are written for the engines."""
        return self.update_weight_transfer_mode == "disk" or self.writes_deltas

    @property
    def external_addresses(self) -> tuple[str, ...]:
        """The addresses of engines that are running already."""
        return self.rollout_external_engine_addrs or ()

    @property
    def keeps_cache(self) -> bool:
        """Whether requests in flight keep the results of the old weights, so that no cache can be flushed."""
        match self.pause_generation_mode:
            case "retract" | "abort":
                return False
            case "in_place":
                return True
            case unknown:
                assert_never(unknown)


def explain_servers(title: str, sglang: SglangArguments, num_engines: int, nodes: int) -> str:
    """Describe the servers of the engine ``title`` in a few words. Each is on ``nodes`` nodes."""
    if sglang.rollout_external:
        return count(len(sglang.external_addresses), f"external {title} engine")
    size = count(sglang.rollout_num_gpus_per_engine, "device")
    return f"{count(num_engines, f'{title} engine')} of {size}" + (f" on {nodes} nodes" if nodes > 1 else "")
