"""Pass ``--sglang-*`` and ``--router-*`` on to SGLang's server and router, which define these flags.

They are recognized by their prefix, checked by name and value against the installed SGLang, and passed on.
"""

import re
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Literal, Optional, assert_never

from miles.base.flags import LONGEST_VALUE, Errors, count, flag
from miles.base.text import one_line
from miles.config.cluster import ClusterArguments
from miles.config.sglang.installed import CONFIG, TABLE, read_server_config, router_flags, server_flags
from miles.config.suggest import nearest_flag

SERVER, ROUTER, VLLM = "--sglang-", "--router-", "--vllm-"
SERVER_KEY, ADMIN_KEY = "--api-key", "--admin-api-key"  # SGLang's flags; the router calls its own key --api-key too
ROUTER_ALIAS = "--sglang-router-"
_ADDRESS = "--ip"  # of a router that runs already, in related launchers

OWNED_BY_LAUNCHER: dict[str, str] = TABLE["owned_by_launcher"]
TENSOR_PARALLEL = ("--tp-size", "--tp", "--tensor-parallel-size")
# Switches of earlier versions, and the flag that has their effect.
REPLACED = {"--enable-ep-moe": "--ep-size", "--enable-deepep-moe": "--moe-a2a-backend"}
DATA_PARALLEL = ("--dp-size", "--dp", "--data-parallel-size")
# An engine here is one tensor-parallel group. Devices of other kinds of parallelism would not be counted,
# and new weights would not reach them.
OTHER_PARALLEL = {
    "--pp-size": "--rollout-num-gpus-per-engine",
    "--pp": "--rollout-num-gpus-per-engine",
    "--pipeline-parallel-size": "--rollout-num-gpus-per-engine",
    "--nnodes": "--rollout-num-gpus-per-engine",
    **dict.fromkeys(DATA_PARALLEL, "--rollout-num-gpus"),
}
# SGLang checks no keys under these flags, and a run gives every server keys.
WITHOUT_KEYS = ("--tokenizer-worker-num", "--grpc-port", "--grpc-mode", "--smg-grpc-mode")
ATTENTION_DATA_PARALLEL = "--enable-dp-attention"  # SGLang's older way to say --attn-dp-size, within tensor parallel

_of_servers = partial(flag, needs="servers")


@dataclass(frozen=True)
class ServerFlags:
    """Hold the words for the command lines of SGLang, its router and vLLM, with the prefixes removed."""

    server: tuple[str, ...] = ()
    router: tuple[str, ...] = ()
    vllm: tuple[str, ...] = ()

    @property
    def server_as_written(self) -> list[str]:
        """The server's flags as the user has written them, without values."""
        return [SERVER + flag.removeprefix("--") for flag, _ in _pairs(self.server)]

    @property
    def router_as_written(self) -> list[str]:
        """The router's flags as the user has written them, without values."""
        return [ROUTER + flag.removeprefix("--") for flag, _ in _pairs(self.router)]


def split_server_flags(words: Sequence[str], own: Collection[str]) -> tuple[list[str], ServerFlags]:
    """Divide the command line into the words of our own parser and the words of servers.

    A flag takes the words up to the next one that starts with ``--``. A flag that is written as one word with its value
    (``'--sglang-dtype float32'``) is cut in two, because launch scripts contain such words.

    Args:
        words: The command line.
        own: The flags of the launcher; some start like SGLang's.

    Returns:
        Our words, and the servers' words.
    """
    ours: list[str] = []
    server: list[str] = []
    router: list[str] = []
    vllm: list[str] = []
    takers = ((ROUTER_ALIAS, router), (ROUTER, router), (SERVER, server), (VLLM, vllm), ("", ours))
    taker = ours
    for word in words:
        if not word.startswith("--"):
            taker.append(word)
            continue
        is_own = word.split("=")[0] in own
        prefix, taker = takers[-1] if is_own else next(pair for pair in takers if word.startswith(pair[0]))
        taker += f"--{word.removeprefix(prefix)}".split(" ", 1) if prefix else [word]
    return ours, ServerFlags(tuple(server), tuple(router), tuple(vllm))


def check_server_flags(flags: ServerFlags, engine_size: int, errors: Errors) -> None:
    """Check that each flag is known to the installed SGLang, and is not set by the launcher itself.

    Args:
        flags: The words that are passed on.
        engine_size: Devices of one engine.
        errors: Collects the errors.
    """
    for prefix, words, known in (
        (SERVER, flags.server, known_server_flags),
        (ROUTER, flags.router, known_router_flags),
    ):
        for name, value in _pairs(words):
            message = _owner_error(prefix, name, value, engine_size) or _unknown_error(prefix, name, known())
            if message is None and prefix == SERVER:
                message = _parallel_error(name, value, has_flag(words, ATTENTION_DATA_PARALLEL), engine_size)
                message = message or _without_keys_error(name, value) or _config_error(name, value)
            message = message or _key_error(prefix, name, value)
            if message is not None:
                errors.add(message)


def value_of(words: Sequence[str], *names: str) -> str | None:
    """Return the value of the last of the named flags in ``words``, or None."""
    values = [value for flag, value in _pairs(words) if flag in names]
    return values[-1] if values else None


def has_flag(words: Sequence[str], *names: str) -> bool:
    """Return whether one of the named flags is among ``words``."""
    return any(flag in names for flag, _ in _pairs(words))


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for index, word in enumerate(words):
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            following = words[index + 1] if index + 1 < len(words) else "--"
            yield flag, value if equals else ("" if following.startswith("--") else following)


def _owner_error(prefix: str, flag: str, value: str, engine_size: int) -> str | None:
    written = prefix + flag.removeprefix("--")
    if flag in OWNED_BY_LAUNCHER:
        return f"{written}: {OWNED_BY_LAUNCHER[flag]}; drop {written}"
    if prefix == SERVER and flag in TENSOR_PARALLEL and value != str(engine_size):
        return (
            f"{written} {value}: contradicts --rollout-num-gpus-per-engine {engine_size}, which is the engine's "
            f"tensor-parallel size; give --rollout-num-gpus-per-engine {value}, and drop {written}"
        )
    return None


def _unknown_error(prefix: str, flag: str, known: Collection[str]) -> str | None:
    if prefix == ROUTER and flag == _ADDRESS:
        rule = "a run starts its own router, and engines that run already are given by their own addresses"
        what_to_do = "give --rollout-external and --rollout-external-engine-addrs HOST:PORT …, and drop it"
        return f"{prefix}{flag[2:]}: {rule}; {what_to_do}"
    if not known or flag in known:
        return None
    if prefix == SERVER and flag in REPLACED:
        return f"{prefix}{flag[2:]}: the installed SGLang has no such flag; give {prefix}{REPLACED[flag][2:]} instead"
    near = nearest_flag(flag, known)
    what_to_do = f"did you mean {prefix}{near.removeprefix('--')}?" if near else f"drop {prefix}{flag[2:]}"
    return f"{prefix}{flag.removeprefix('--')}: the installed SGLang has no such flag; {what_to_do}"


def _parallel_error(flag: str, value: str, attention_only: bool, engine_size: int) -> str | None:
    """Return the error of a kind of parallelism whose devices would not be counted."""
    counted = OTHER_PARALLEL.get(flag)
    if counted is None or value == "1" or (attention_only and flag in DATA_PARALLEL):
        return None
    if not re.fullmatch(r"-?\d+", value):
        return None  # its value is checked later
    written = SERVER + flag.removeprefix("--")
    if flag in DATA_PARALLEL and value.isdecimal() and int(value):
        devices = int(value) * engine_size
        return (
            f"{written} {value}: SGLang updates no weights of replicas inside a server, so each is an engine here, and "
            f"{value} of them need {devices} devices or a multiple; give --rollout-num-gpus {devices}, as many to "
            f"--colocate, or add --sglang{ATTENTION_DATA_PARALLEL[1:]} for data parallelism inside one engine"
        )
    rule, what_to_do = "an engine here is tensor parallel", f"for more devices per engine give {counted}"
    return f"{written} {value}: {rule}; {what_to_do}, and drop {written}"


def _without_keys_error(flag: str, value: str) -> str | None:
    if flag not in WITHOUT_KEYS or value == "1":
        return None
    written = SERVER + flag.removeprefix("--")
    return f"{written}: SGLang would answer everybody, since it checks no keys under this flag; drop {written}"


def _config_error(flag: str, value: str) -> str | None:
    """Return why a file of flags was not read as these flags."""
    if flag != CONFIG or not value:
        return None
    _, fault = read_server_config(value)
    return f"{SERVER}config {one_line(value, LONGEST_VALUE)}: {fault or 'is given twice; give one file'}"


def _key_error(prefix: str, flag: str, value: str) -> str | None:
    """Return the error of a key that no HTTP header can carry, or that reads as a flag. The key is not shown."""
    if flag not in (SERVER_KEY, ADMIN_KEY) or re.fullmatch(r"(?!-)[!-~]+", value):
        return None
    written = prefix + flag.removeprefix("--")
    rule = 'a key must be one word of ASCII letters, digits and signs, and not begin with "-"'
    return f"{written}: {rule}; give another one, or drop {written}"


def known_server_flags() -> Set[str]:
    """Return the flags of SGLang's ``ServerArgs``; none if SGLang is not installed on this host."""
    return server_flags().keys()


def known_router_flags() -> Set[str]:
    """Return the flags of sglang-router's ``RouterArgs``; none if the router is not installed here."""
    return router_flags().keys()


# Configure the SGLang servers: how many, their requests, their weights, and what happens when one fails.


DEVICES_OF_A_NODE = 8


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
