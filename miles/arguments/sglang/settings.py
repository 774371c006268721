"""SGLang servers: how many, how they are fed, how weights reach them, and what happens when one fails."""

from dataclasses import dataclass
from typing import Literal, Optional

from miles.flags import flag


@dataclass(frozen=True)
class SglangArguments:
    """sglang: generation servers. Further `--sglang-NAME` and `--router-NAME` flags go to them as `--NAME`."""

    rollout_num_gpus_per_engine: int = flag(1, "devices of one engine: its tensor-parallel size")
    sglang_server_concurrency: int = flag(512, "requests in flight at one engine; further ones wait here")
    rollout_external: bool = flag(False, "use engines that are running already instead of starting them")
    rollout_external_engine_addrs: Optional[tuple[str, ...]] = flag(
        None, "their addresses, HOST:PORT each", nargs="+", type=str, metavar="ADDR"
    )
    update_weight_transfer_mode: Literal["disk", "broadcast", "ipc"] = flag(
        "broadcast",
        "how new weights reach the engines: a file, a broadcast over gloo, or the shared memory of one host",
    )
    update_weight_disk_dir: Optional[str] = flag(
        None, "folder for --update-weight-transfer-mode disk; default: weights/ in --output-dir", metavar="DIR"
    )
    pause_generation_mode: Literal["retract", "in_place"] = flag(
        "retract",
        "requests in flight when weights change: retract computes their cache anew, in_place goes on with the old one",
    )
    check_weight_update_equal: bool = flag(
        False, "after each update, compare every tensor's checksum with that of the same weights loaded from a file"
    )
    use_fault_tolerance: bool = flag(
        False, "restart engines, and the rollout worker, when they fail, instead of ending the run"
    )
    rollout_health_check_interval: float = flag(30.0, "seconds between health checks of an engine")
    rollout_health_check_timeout: float = flag(30.0, "seconds after which an engine that does not answer has failed")


@dataclass(frozen=True)
class ServerFlags:
    """The words that go to SGLang's own command lines as they are, prefixes removed (server_flags.py)."""

    server: tuple[str, ...] = ()
    router: tuple[str, ...] = ()
