"""vLLM servers as one engine."""

from __future__ import annotations

from miles.config.servers.passed_on import ServerFlags
from miles.config.settings import Settings
from miles.config.vllm.environment import vllm_python
from miles.engine.base import EngineHost
from miles.engine.servers.engine import ServersEngine, start_servers
from miles.engine.servers.keys import Keys, keys_of
from miles.engine.vllm.client import VllmClient, VllmReceiver
from miles.engine.vllm.launch import VllmProgram


class VllmEngine(ServersEngine):
    """Generate with vLLM servers. A seed repeats a response, but for what other requests do to rounding."""

    client = VllmClient
    receiver = VllmReceiver


async def start(settings: Settings, host: EngineHost) -> VllmEngine:
    """Start the engine of a run: servers that ``host`` starts. Each request goes to the one that has the fewest."""
    keys = keys_of(ServerFlags(), external=False)
    return await start_servers(
        VllmEngine, settings, host, keys, lambda number, node: server_program(settings, host.device, number, keys)
    )


def server_program(settings: Settings, device: str, number: int, keys: Keys) -> VllmProgram:
    """Return the program of server ``number``, with ``keys``."""
    return VllmProgram.of(
        settings,
        device,
        number,
        keys,
        flags=settings.server_flags.vllm,
        python=vllm_python(settings.vllm.vllm_python),
        raw_log_probs=settings.rollout.truncates_sampling and not settings.rollout.replays_support,
        cache_gib=settings.vllm.vllm_cpu_cache_gib,
    )
