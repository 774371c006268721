"""SGLang servers as one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from miles.config.model import has_vision_tower
from miles.config.settings import Settings
from miles.engine.base import EngineHost, Server, ServerPart
from miles.engine.servers.engine import ServersEngine, start_servers
from miles.engine.servers.keys import Keys, keys_of
from miles.engine.servers.launch import START_SECONDS, ServerOnHost
from miles.engine.servers.server_log import LogFile
from miles.engine.servers.spanning import SpanningServer
from miles.engine.sglang.client import SglangClient
from miles.engine.sglang.launch import ExternalServer, ServerSpec
from miles.engine.sglang.receiver import SglangReceiver
from miles.engine.sglang.router import Router


class SglangEngine(ServersEngine):
    """Generate with SGLang servers. Seeds repeat a response only under deterministic inference on GPUs."""

    client = SglangClient
    receiver = SglangReceiver


async def start(settings: Settings, host: EngineHost) -> SglangEngine:
    """Start the engine of a run: servers that ``host`` starts, and those at the given addresses."""
    keys = keys_of(settings.server_flags, settings.sglang.rollout_external)

    def processes(log: Callable[[str], LogFile]) -> Sequence[Server]:
        servers: list[Server] = []
        for number in range(settings.num_engines):
            parts = list[ServerPart]()
            for node in range(settings.nodes_per_engine):
                spec = replace(server_spec(settings, host.device, number, keys), node=node)
                name = f"engine_{number}_node_{node}.log" if node else f"engine_{number}.log"
                parts.append(host.place_server(number, partial(ServerOnHost, spec, log(name)), START_SECONDS, node))
            servers.append(SpanningServer(parts) if len(parts) > 1 else parts[0])
        return [*servers, *(ExternalServer(address, keys) for address in settings.sglang.external_addresses)]

    def router(log: LogFile, requests: int) -> Router:
        return Router(settings.server_flags.router, "127.0.0.1", log, requests, keys)

    return await start_servers(SglangEngine, settings, host, keys, processes, router)


def server_spec(settings: Settings, device: str, number: int, keys: Keys) -> ServerSpec:
    """Return what server ``number`` serves, with ``keys``. Servers differ only in their seeds.

    It has all settings, because a server's command line gathers six sections (model, training, sglang, data, the flags
    passed on, and cluster for the offload).
    """
    assert settings.model.hf_checkpoint is not None
    return ServerSpec(
        model_path=settings.model.hf_checkpoint,
        dtype="bfloat16" if settings.training.bf16 else "float32",
        device=device,
        num_devices=settings.sglang.rollout_num_gpus_per_engine,
        seed=settings.data.rollout_seed + number,
        flags=settings.server_flags.server,
        releases_memory=settings.offload(device).rollout,
        keys=keys,
        is_deterministic=settings.training.deterministic_mode,
        fp32_head=settings.training.fp32_lm_head,
        says_experts=settings.rollout.use_rollout_routing_replay,
        reads_images=has_vision_tower(settings.model, if_absent=False),
        reads_text=bool(settings.rollout.stop_texts),
        nodes=settings.nodes_per_engine,
    )
