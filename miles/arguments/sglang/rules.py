"""Which engine generates, on which devices, and which flags it has."""

from __future__ import annotations

from dataclasses import fields

from miles.arguments.settings import Settings
from miles.arguments.sglang.server_flags import ROUTER, SERVER, check_server_flags
from miles.arguments.sglang.settings import ServerFlags, SglangArguments
from miles.flags import above, at_least, refuse, refuse_ignored


def check_engines(settings: Settings) -> None:
    """No SGLang flag without SGLang, devices that engines divide, addresses where engines are external."""
    if settings.rollout.rollout_engine == "torch":
        _check_no_sglang(settings)
        return
    sglang = settings.sglang
    refuse_ignored(
        settings.rollout, ["torch_engine_max_batch_size"], "with --rollout-engine sglang", "use --rollout-engine torch"
    )
    at_least(sglang, 1, "rollout_num_gpus_per_engine", "sglang_server_concurrency")
    above(sglang, 0, "rollout_health_check_interval", "rollout_health_check_timeout")
    check_server_flags(settings.server_flags, sglang.rollout_num_gpus_per_engine)
    _check_external(settings)
    _check_devices(settings)
    _check_router(settings)
    if sglang.update_weight_transfer_mode != "disk":
        why = f"with --update-weight-transfer-mode {sglang.update_weight_transfer_mode}"
        refuse_ignored(sglang, ["update_weight_disk_dir"], why, "use --update-weight-transfer-mode disk")


def _check_router(settings: Settings) -> None:
    """One engine is asked directly."""
    words = settings.server_flags.router
    if words and settings.num_engines + len(settings.sglang.rollout_external_engine_addrs or ()) < 2:
        written = ROUTER + words[0].removeprefix("--")
        raise ValueError(f"{written}: would be ignored with one engine; give --rollout-num-gpus for two, or drop it")


def _check_no_sglang(settings: Settings) -> None:
    why, way_out = "by --rollout-engine torch", "use --rollout-engine sglang"
    own = [field.name for field in fields(SglangArguments) if field.name != "use_fault_tolerance"]
    refuse_ignored(settings.sglang, own, why, way_out)
    for prefix, words in ((SERVER, settings.server_flags.server), (ROUTER, settings.server_flags.router)):
        if words:
            written = prefix + words[0].removeprefix("--")
            raise ValueError(f"{written}: would be ignored {why}; {way_out}, or drop {written}")
    if settings.cluster.rollout_num_gpus not in (None, 1) and not settings.cluster.colocate:
        rule = "the embedded torch engine runs on one device"
        refuse("rollout_num_gpus", settings.cluster.rollout_num_gpus, rule, "give 1, or use --rollout-engine sglang")


def _check_external(settings: Settings) -> None:
    sglang = settings.sglang
    addresses = sglang.rollout_external_engine_addrs
    if not sglang.rollout_external:
        refuse_ignored(sglang, ["rollout_external_engine_addrs"], "without --rollout-external", "add that switch")
        return
    if not addresses:
        raise ValueError("--rollout-external needs --rollout-external-engine-addrs: the engines; add HOST:PORT of each")
    for address in addresses:
        host, _, port = address.removeprefix("http://").rpartition(":")
        if not host or not port.isdigit():
            refuse("rollout_external_engine_addrs", address, "is not HOST:PORT", "write it as 127.0.0.1:30000")
    refuse_ignored(settings.cluster, ["rollout_num_gpus"], "with --rollout-external", "start the engines here")
    if settings.server_flags != ServerFlags(router=settings.server_flags.router):
        written = SERVER + settings.server_flags.server[0].removeprefix("--")
        raise ValueError(
            f"{written}: would be ignored with --rollout-external, whose engines run already; give it to them when "
            f"they start, or drop {written}"
        )


def _check_devices(settings: Settings) -> None:
    colocate, size = settings.cluster.colocate, settings.sglang.rollout_num_gpus_per_engine
    if settings.sglang.rollout_external:
        return
    given = settings.engine_devices
    if given % size:
        devices = "the trainer's devices (--colocate)" if colocate else f"--rollout-num-gpus {given}"
        rule = f"{devices} are {given}, which engines of {size} devices do not divide"
        multiple = f", or --rollout-num-gpus {given - given % size + size}"
        refuse("rollout_num_gpus_per_engine", size, rule, f"give a divisor of {given}{'' if colocate else multiple}")
