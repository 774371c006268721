"""Flags of SGLang's servers: our own, and those of SGLang and its router, checked against the installed SGLang."""

import re
from collections.abc import Collection, Set

from miles.base.flags import LONGEST_VALUE, Errors
from miles.base.text import one_line
from miles.config.servers.passed_on import ROUTER, SERVER, ServerFlags, has_flag, pairs
from miles.config.sglang.installed import CONFIG, TABLE, read_server_config, router_flags, server_flags
from miles.config.suggest import nearest_flag

SERVER_KEY, ADMIN_KEY = "--api-key", "--admin-api-key"  # SGLang's flags; the router calls its own key --api-key too
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
        for name, value in pairs(words):
            message = _owner_error(prefix, name, value, engine_size) or _unknown_error(prefix, name, known())
            if message is None and prefix == SERVER:
                message = _parallel_error(name, value, has_flag(words, ATTENTION_DATA_PARALLEL), engine_size)
                message = message or _without_keys_error(name, value) or _config_error(name, value)
            message = message or _key_error(prefix, name, value)
            if message is not None:
                errors.add(message)


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
