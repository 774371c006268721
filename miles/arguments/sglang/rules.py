"""Check the engine that generates: its devices, its addresses, and the flags that are passed on to it."""

from __future__ import annotations

from dataclasses import fields

from miles.arguments.cluster import ClusterArguments
from miles.arguments.settings import Settings
from miles.arguments.sglang.server_flags import ServerFlags, check_server_flags
from miles.arguments.sglang.settings import SglangArguments
from miles.flags import Errors


def check_engine(settings: Settings, errors: Errors) -> None:
    """Check the flags of the chosen engine, and that no other engine's are given."""
    engine = settings.rollout.rollout_engine
    if engine == "torch":
        _check_no_servers(settings.cluster, settings.sglang, settings.server_flags, errors)
    elif engine == "sglang":
        _check_servers(settings, errors)
    else:
        raise AssertionError(f"--rollout-engine {engine} has no rules")


def _check_no_servers(
    cluster: ClusterArguments, sglang: SglangArguments, passed_on: ServerFlags, errors: Errors
) -> None:
    why, way_out = "by --rollout-engine torch", "use --rollout-engine sglang"
    own = [field.name for field in fields(SglangArguments) if field.name != "use_fault_tolerance"]
    errors.refuse_ignored(sglang, own, why, way_out)
    for written in (*passed_on.server_as_written, *passed_on.router_as_written):
        errors.add(f"{written}: would be ignored {why}; {way_out}, or drop {written}")
    if cluster.rollout_num_gpus not in (None, 1) and not cluster.colocate and errors.none_about("rollout_num_gpus"):
        rule = "the embedded torch engine runs on one device"
        errors.refuse("rollout_num_gpus", cluster.rollout_num_gpus, rule, "give 1, or use --rollout-engine sglang")


def _check_servers(settings: Settings, errors: Errors) -> None:
    sglang, passed_on = settings.sglang, settings.server_flags
    errors.at_least(sglang, 1, "rollout_num_gpus_per_engine", "sglang_server_concurrency")
    errors.above(sglang, 0, "rollout_health_check_interval", "rollout_health_check_timeout")
    check_server_flags(passed_on, sglang.rollout_num_gpus_per_engine, errors)
    _check_external(settings.cluster, sglang, passed_on, errors)
    if can_count_engines(errors):
        if not sglang.rollout_external:
            _check_devices(settings.cluster, settings.engine_devices, sglang.rollout_num_gpus_per_engine, errors)
        num_servers = settings.num_engines + len(sglang.rollout_external_engine_addrs or ())
        for written in passed_on.router_as_written if num_servers < 2 else ():
            errors.add(f"{written}: would be ignored with one engine; give --rollout-num-gpus for two, or drop it")
    if sglang.update_weight_transfer_mode != "disk":
        why = f"with --update-weight-transfer-mode {sglang.update_weight_transfer_mode}"
        errors.refuse_ignored(sglang, ["update_weight_disk_dir"], why, "use --update-weight-transfer-mode disk")


def can_count_engines(errors: Errors) -> bool:
    """Return whether the numbers of devices are valid, so that engines can be counted."""
    devices = ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus", "rollout_num_gpus_per_engine")
    return errors.none_about(*devices)


def _check_external(cluster: ClusterArguments, sglang: SglangArguments, passed_on: ServerFlags, errors: Errors) -> None:
    addresses = sglang.rollout_external_engine_addrs
    if not sglang.rollout_external:
        unused = ["rollout_external_engine_addrs"]
        errors.refuse_ignored(sglang, unused, "without --rollout-external", "add that switch")
        return
    if not addresses:
        way_out = "add HOST:PORT of each engine"
        errors.add(f"--rollout-external needs --rollout-external-engine-addrs: the engines; {way_out}")
    for address in addresses or ():
        host, _, port = address.removeprefix("http://").rpartition(":")
        if not host or not port.isdigit():
            rule, way_out = "is not HOST:PORT", "write it as 127.0.0.1:30000"
            errors.refuse("rollout_external_engine_addrs", address, rule, way_out)
    errors.refuse_ignored(cluster, ["rollout_num_gpus"], "with --rollout-external", "start the engines here")
    for written in passed_on.server_as_written:
        errors.add(
            f"{written}: would be ignored with --rollout-external, whose engines are already running; give it to them "
            f"when they start, or drop {written}"
        )


def _check_devices(cluster: ClusterArguments, devices: int, size: int, errors: Errors) -> None:
    if devices % size:
        given = "the trainer's devices (--colocate)" if cluster.colocate else f"--rollout-num-gpus {devices}"
        rule = f"{given} are {devices}, which cannot be divided into engines of {size} devices"
        multiple = "" if cluster.colocate else f", or --rollout-num-gpus {devices - devices % size + size}"
        errors.refuse("rollout_num_gpus_per_engine", size, rule, f"give a divisor of {devices}{multiple}")
