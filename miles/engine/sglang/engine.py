"""SGLang servers as one engine."""

from __future__ import annotations

from dataclasses import replace

from miles.config.settings import Settings
from miles.engine.base import EngineHost
from miles.engine.servers.engine import ServersEngine, start_servers
from miles.engine.servers.keys import Keys, keys_of
from miles.engine.servers.processes import LogFile
from miles.engine.sglang.client import SglangClient, SglangReceiver
from miles.engine.sglang.launch import ExternalServer, SglangProgram
from miles.engine.sglang.router import Router


class SglangEngine(ServersEngine):
    """Generate with SGLang servers. Seeds repeat a response only under deterministic inference on GPUs."""

    client = SglangClient
    receiver = SglangReceiver


async def start(settings: Settings, host: EngineHost) -> SglangEngine:
    """Start the engine of a run: servers that ``host`` starts, and those at the given addresses."""
    keys = keys_of(settings.server_flags, settings.sglang.rollout_external)
    external = [ExternalServer(address, keys) for address in settings.sglang.external_addresses]

    def program_of(number: int, node: int) -> SglangProgram:
        return replace(server_program(settings, host.device, number, keys), node=node)

    def router(log: LogFile, requests: int) -> Router:
        return Router(settings.server_flags.router, "127.0.0.1", log, requests, keys)

    return await start_servers(SglangEngine, settings, host, keys, program_of, external, router)


def server_program(settings: Settings, device: str, number: int, keys: Keys) -> SglangProgram:
    """Return the program of server ``number``, with ``keys``."""
    return SglangProgram.of(
        settings,
        device,
        number,
        keys,
        flags=settings.server_flags.server,
        is_deterministic=settings.training.deterministic_mode,
        fp32_head=settings.training.fp32_lm_head,
        returns_experts=settings.rollout.use_rollout_routing_replay,
        nodes=settings.nodes_per_engine,
    )
