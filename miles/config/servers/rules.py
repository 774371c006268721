"""Check servers of any program: their numbers, devices, files of weights, and requests in flight."""

from dataclasses import replace

from miles.base.flags import Errors, flag_name
from miles.config.cluster import ClusterArguments
from miles.config.components import ENGINES, call, names_with
from miles.config.model import local_config
from miles.config.servers.flags import SglangArguments
from miles.config.settings import Settings
from miles.models.packing import why_not_generated

ABORT = "abort"  # of --pause-generation-mode
QUANTIZED_AT_START = "quantizes weights when it starts, and not those that the trainer sends"


def check_engine(settings: Settings, errors: Errors) -> None:
    """Check the flags of the chosen engine, and that none are given to servers of another."""
    name, engine = settings.rollout.rollout_engine, settings.engine
    for other, row in ENGINES.items():
        for flag in settings.server_flags.written(set(row.prefixes) - set(engine.prefixes)):
            errors.add(
                f"{flag}: would be ignored by --rollout-engine {name}; use --rollout-engine {other}, or drop {flag}"
            )
    if engine.has_servers:
        _check_common(settings, errors)
        call(engine.rules, settings, errors)
    elif settings.generates and errors.none_about("hf_checkpoint"):
        with errors.catching():
            config = local_config(settings.model, "hf_checkpoint")
            if config is not None and (fault := why_not_generated(config)):
                errors.refuse("hf_checkpoint", settings.model.hf_checkpoint, *fault)


def _check_common(settings: Settings, errors: Errors) -> None:
    """Check what concerns servers of any program: their numbers, devices, files of weights, and requests in flight."""
    sglang = settings.sglang
    if can_count_engines(errors) and not sglang.rollout_external:
        _check_devices(settings.cluster, settings.engine_devices, sglang.rollout_num_gpus_per_engine, errors)
        _check_nodes(settings.cluster, sglang, errors)
    if sglang.writes_deltas and sglang.rollout_external:
        rule = "engines that are running already have nothing of this run on their hosts that could apply a delta"
        what_to_do = "use --update-weight-transfer-mode disk"
        errors.refuse("update_weight_transfer_mode", sglang.update_weight_transfer_mode, rule, what_to_do)
    if sglang.pause_generation_mode == ABORT and settings.rollout.fully_async:
        rule = "would end the requests in flight, which --fully-async continues with the new weights"
        errors.refuse("pause_generation_mode", ABORT, rule, "give retract or in_place")


def _check_devices(cluster: ClusterArguments, devices: int, size: int, errors: Errors) -> None:
    if devices % size:
        subject = "the trainer's devices (--colocate)" if cluster.colocate else f"--rollout-num-gpus {devices}"
        rule = f"{subject} are {devices}, which cannot be divided into engines of {size} devices"
        multiple = "" if cluster.colocate else f", or --rollout-num-gpus {devices - devices % size + size}"
        errors.refuse("rollout_num_gpus_per_engine", size, rule, f"give a divisor of {devices}{multiple}")


def _check_nodes(cluster: ClusterArguments, sglang: SglangArguments, errors: Errors) -> None:
    """Check that an engine lies within a node, or has all devices of several nodes."""
    size, per_node = sglang.rollout_num_gpus_per_engine, sglang.per_node(cluster)
    if not errors.none_about("rollout_num_gpus_per_engine", "num_gpus_per_node"):
        return
    flag = "actor_num_gpus_per_node" if cluster.colocate else "num_gpus_per_node"
    shared = cluster.colocate and per_node % size
    if size % per_node and (size > per_node or shared):
        rule = f"an engine lies within a node or has whole nodes, and a node has {flag_name(flag)} {per_node}"
        what_to_do = f"give a divisor or a multiple of {per_node}"
        if not cluster.colocate:
            what_to_do += ", or the size of your nodes as --num-gpus-per-node"
        errors.refuse("rollout_num_gpus_per_engine", size, rule, what_to_do)
    elif size > per_node and sglang.update_weight_transfer_mode == "ipc":
        rule = f"an engine of {size} devices spans nodes of {per_node}, and no memory is shared between nodes"
        errors.refuse("update_weight_transfer_mode", "ipc", rule, "use --update-weight-transfer-mode broadcast")


def can_count_engines(errors: Errors) -> bool:
    """Return whether the numbers of devices are valid, so that engines can be counted."""
    devices = ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus", "rollout_num_gpus_per_engine")
    return errors.none_about(*devices)


def check_rollout_workers(settings: Settings, errors: Errors) -> None:
    """Check ``--num-rollout-workers``: the engine can be shared, and every process gets a share of each limit."""
    name, rollout, sglang = "num_rollout_workers", settings.rollout, settings.sglang
    workers = rollout.num_rollout_workers
    if workers <= 1:
        return
    if not settings.engine.has_servers:
        rule = f"the {rollout.rollout_engine} engine runs inside the rollout process, so no other process can reach it"
        errors.refuse(name, workers, rule, f"use --rollout-engine {names_with(ENGINES, 'has_servers')}, or give 1")
        return
    if rollout.agent_command is not None and 1 <= rollout.agent_concurrency < workers:
        rule = f"leaves some of them without a program: --agent-concurrency {rollout.agent_concurrency} is for all"
        errors.refuse(name, workers, rule, f"give --agent-concurrency {workers} or more, or fewer workers")
    if can_count_engines(errors) and errors.none_about("sglang_server_concurrency", "rollout_external"):
        requests = sglang.sglang_server_concurrency * (settings.num_engines + len(sglang.external_addresses))
        if 0 < requests < workers:
            rule = f"leaves some of them without a request: all servers together take {requests} at once"
            errors.refuse(name, workers, rule, f"give at most {requests}, or a larger --sglang-server-concurrency")


def fill_rollout_num_gpus(settings: Settings) -> ClusterArguments:
    """Return the cluster section with ``rollout_num_gpus``, the devices of one engine if servers are not counted."""
    cluster, size = settings.cluster, settings.sglang.rollout_num_gpus_per_engine
    starts = settings.engine.has_servers and not settings.sglang.rollout_external
    if not starts or cluster.colocate or cluster.rollout_num_gpus is not None or size < 1:
        return cluster
    return replace(cluster, rollout_num_gpus=size)


def fill_server_section(settings: Settings) -> tuple[SglangArguments, list[str]]:
    """Return the section with a mode of pauses that the engine has, and a note if another was read as this."""
    sglang = settings.sglang
    if sglang.pause_generation_mode != ABORT:
        return sglang, []
    why = "without --fully-async no request is in flight when weights change"
    note = f"--pause-generation-mode abort is read as retract: {why}"
    return replace(sglang, pause_generation_mode="retract"), [note]
