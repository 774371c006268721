"""Read the flags of SGLang's servers: earlier names, and flags that the run sets itself or does without."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from miles.config.abilities import reads_sglang_flags
from miles.config.notes import NO_EFFECT, OTHER_PART, READ_AS, SAME, SPEED, Note, written
from miles.config.settings import Settings
from miles.config.sglang.config_file import CONFIG, read_server_config
from miles.config.sglang.flags import (
    ATTENTION_DATA_PARALLEL,
    DATA_PARALLEL,
    REPLACED,
    ROUTER,
    SERVER,
    TENSOR_PARALLEL,
    ServerFlags,
    has_flag,
    known_router_flags,
    known_server_flags,
)
from miles.config.spelling import Group, group_words

# Earlier name -> name in current releases. Used only if the installed release knows the second, and not the first.
RENAMED = {
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--nsa-prefill-backend": "--dsa-prefill-backend",
    "--nsa-decode-backend": "--dsa-decode-backend",
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
}
# Words that argparse, and so SGLang, reads as the beginning of a longer flag.
SHORTENED = {"--tp": "--tp-size", "--dp": "--dp-size", "--pp": "--pp-size"}
# Flags of the weight loader that starts from other engines over RDMA. The launcher sends all weights to every engine.
_REMOTE_LOADER = "--remote-instance-weight-loader-"
_DELTAS = "--update-weight-delta-"  # of an SGLang that is changed for related launchers
# They change the generated text, so an engine that does not read them cannot run the command.
CHANGES_RESULTS = {
    "--context-length",
    "--quantization",
    "--kv-cache-dtype",
    "--enable-multimodal",
    "--json-model-override-args",
    "--enable-lora",
    "--lora-paths",
    "--sampling-defaults",
}
# Of adapters that a server holds. Here it receives the weights with the trained adapter added to them.
OF_ADAPTERS = {
    "--enable-lora",
    "--lora-backend",
    "--lora-target-modules",
    "--lora-use-virtual-experts",
    "--max-lora-rank",
    "--max-loras-per-batch",
}
OF_ADAPTERS_WHY = "engines receive the weights with the adapter added to them"


def normalize_server_flags(settings: Settings) -> tuple[Settings, list[Note]]:
    """Rename flags and drop those that the launcher sets; drop all of them if no SGLang server generates."""
    flags, notes = _normalize_adapters(settings.server_flags)
    if not reads_sglang_flags(settings):
        kept = [group for group in group_words(flags.server) if group[0] in CHANGES_RESULTS]
        dropped = [group for group in group_words(flags.server) if group not in kept]
        notes += [_note(OTHER_PART, group, "SGLang's, and another engine generates") for group in dropped]
        notes += [
            Note(OTHER_PART, _written(group, ROUTER), "SGLang's, and another engine generates")
            for group in group_words(flags.router)
        ]
        return replace(settings, server_flags=replace(settings.server_flags, server=_words(kept), router=())), notes
    flags, found = _normalize_config(flags)
    notes += found
    settings, flags, found = _normalize_replicas(settings, flags)
    notes += found
    server = list[Group]()
    for group in group_words(flags.server):
        instead = _replacement(group, settings)
        normalized: Group | None
        note: Note | None
        if instead is None:
            normalized, note = _normalize(group, settings.sglang.rollout_num_gpus_per_engine, known_server_flags)
        elif has_flag(flags.server, instead[0]):
            normalized, note = None, _note(NO_EFFECT, group, f"--sglang-{instead[0][2:]} states it")
        else:
            normalized, note = instead, _note(READ_AS, group, _written(instead, SERVER))
        server += [normalized] if normalized is not None else []
        notes += [note] if note is not None else []
    router, router_notes = _normalize_router(group_words(flags.router), settings)
    return replace(
        settings, server_flags=replace(settings.server_flags, server=_words(server), router=_words(router))
    ), [*notes, *router_notes]


def _normalize_config(flags: ServerFlags) -> tuple[ServerFlags, list[Note]]:
    """Read SGLang's own file of flags as these flags; what cannot be read so stays, and is refused later."""
    groups = group_words(flags.server)
    files = [group for group in groups if group[0] == CONFIG]
    if len(files) != 1 or len(files[0][1]) != 1:
        return flags, []
    words, fault = read_server_config(files[0][1][0])
    if fault is not None:
        return flags, []
    others = _words([group for group in groups if group[0] != CONFIG])
    instead = " ".join(SERVER + flag[2:] for flag, _ in group_words(words))  # no values: one may be a key
    return replace(flags, server=(*words, *others)), [_note(READ_AS, files[0], instead or "no flags")]


def _normalize_adapters(flags: ServerFlags) -> tuple[ServerFlags, list[Note]]:
    """Drop the flags of adapters, unless the servers are given adapters of their own."""
    groups = group_words(flags.server)
    if any(flag == "--lora-paths" for flag, _ in groups):
        return flags, []
    idle = [group for group in groups if group[0] in OF_ADAPTERS]
    kept = [group for group in groups if group not in idle]
    return replace(flags, server=_words(kept)), [_note(SAME, group, OF_ADAPTERS_WHY) for group in idle]


def _normalize_replicas(settings: Settings, flags: ServerFlags) -> tuple[Settings, ServerFlags, list[Note]]:
    """Read the replicas that a server would hold as engines: each has its own server, behind the router.

    SGLang updates no weights of a server with replicas. What cannot be read so stays, and is refused later.
    """
    groups = group_words(flags.server)
    last = next((group for group in reversed(groups) if group[0] in DATA_PARALLEL), None)
    attention = has_flag(flags.server, ATTENTION_DATA_PARALLEL)
    if last is None or attention or settings.sglang.rollout_external or len(last[1]) != 1:
        return settings, flags, []
    replicas = int(last[1][0]) if last[1][0].isdecimal() else 0
    cluster, size = settings.cluster, settings.sglang.rollout_num_gpus_per_engine
    if replicas < 2 or size < 1:
        return settings, flags, []
    if cluster.rollout_num_gpus is None and not cluster.colocate:
        cluster = replace(cluster, rollout_num_gpus=replicas * size)
    devices = cluster.world_size if cluster.colocate else cluster.rollout_num_gpus or 0
    if devices < 1 or devices % (replicas * size):
        return settings, flags, []
    engines = f"{devices // size} engines of --rollout-num-gpus-per-engine {size} behind the router: a replica is one"
    kept = _words([group for group in groups if group[0] not in DATA_PARALLEL])
    return replace(settings, cluster=cluster), replace(flags, server=kept), [_note(READ_AS, last, engines)]


def _normalize_router(groups: list[Group], settings: Settings) -> tuple[list[Group], list[Note]]:
    """Drop the flags of a router that is not started. Unknown flags stay, and are refused later."""
    cluster, size = settings.cluster, settings.sglang.rollout_num_gpus_per_engine
    devices = cluster.world_size if cluster.colocate else cluster.rollout_num_gpus or size
    if size < 1 or settings.sglang.rollout_external or devices // size > 1:
        return groups, []
    known = known_router_flags()
    unknown = [group for group in groups if known and group[0] not in known]
    idle = [group for group in groups if group not in unknown]
    return unknown, [Note(NO_EFFECT, _written(group, ROUTER), "one engine needs no router") for group in idle]


def _replacement(group: Group, settings: Settings) -> Group | None:
    """Return the flag and the value that have the effect of a switch of earlier versions; None for other flags."""
    flag, known = group[0], known_server_flags()
    if flag not in REPLACED or flag in known or REPLACED[flag] not in known:
        return None
    values = {"--enable-ep-moe": str(settings.sglang.rollout_num_gpus_per_engine), "--enable-deepep-moe": "deepep"}
    return REPLACED[flag], (values[flag],)


def _normalize(
    group: Group, engine_size: int, known_flags: Callable[[], Collection[str]]
) -> tuple[Group | None, Note | None]:
    flag, values = group
    if flag in TENSOR_PARALLEL and values != (str(engine_size),):
        why = f"an engine has the size of --rollout-num-gpus-per-engine {engine_size}"
        return None, _note(NO_EFFECT, group, why)
    known = known_flags()
    if not known or flag in known:
        return group, None
    if SHORTENED.get(flag) in known:
        return (SHORTENED[flag], values), None
    if RENAMED.get(flag) in known:
        return (RENAMED[flag], values), _note(READ_AS, group, SERVER + RENAMED[flag].removeprefix("--"))
    if flag.startswith((_REMOTE_LOADER, _DELTAS)):
        return None, _note(SPEED, group, "every engine receives its weights from the trainer")
    return group, None


def _note(heading: str, group: Group, why: str) -> Note:
    return Note(heading, _written(group, SERVER), why)


def _written(group: Group, prefix: str) -> str:
    flag, values = group
    return written(prefix + flag.removeprefix("--"), values)


def _words(groups: list[Group]) -> tuple[str, ...]:
    return tuple(word for flag, values in groups for word in (flag, *values))
