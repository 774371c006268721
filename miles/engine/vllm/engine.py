"""vLLM servers as one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from miles.config.model import has_vision_tower
from miles.config.servers.passed_on import ServerFlags
from miles.config.settings import Settings
from miles.config.vllm.environment import vllm_python
from miles.engine.base import EngineHost, Server
from miles.engine.servers.engine import ServersEngine, start_servers
from miles.engine.servers.keys import Keys, keys_of
from miles.engine.servers.launch import START_SECONDS, ServerOnHost
from miles.engine.servers.server_log import LogFile
from miles.engine.vllm.client import VllmClient
from miles.engine.vllm.launch import VllmProgram
from miles.engine.vllm.receiver import VllmReceiver


class VllmEngine(ServersEngine):
    """Generate with vLLM servers. A seed repeats a response, but for what other requests do to rounding."""

    client = VllmClient
    receiver = VllmReceiver


async def start(settings: Settings, host: EngineHost) -> VllmEngine:
    """Start the engine of a run: servers that ``host`` starts. Each request goes to the one that has the fewest."""
    keys = keys_of(ServerFlags(), external=False)

    def processes(log: Callable[[str], LogFile]) -> Sequence[Server]:
        return [
            host.place_server(
                number,
                partial(ServerOnHost, vllm_program(settings, host.device, number, keys), log(f"engine_{number}.log")),
                START_SECONDS,
            )
            for number in range(settings.num_engines)
        ]

    return await start_servers(VllmEngine, settings, host, keys, processes)


def vllm_program(settings: Settings, device: str, number: int, keys: Keys) -> VllmProgram:
    """Return what server ``number`` runs, with ``keys``. Servers differ only in their seeds."""
    assert settings.model.hf_checkpoint is not None
    rollout = settings.rollout
    return VllmProgram(
        python=vllm_python(settings.vllm.vllm_python),
        model_path=settings.model.hf_checkpoint,
        dtype="bfloat16" if settings.training.bf16 else "float32",
        device=device,
        num_devices=settings.sglang.rollout_num_gpus_per_engine,
        seed=settings.data.rollout_seed + number,
        keys=keys,
        flags=settings.server_flags.vllm,
        raw_log_probs=rollout.truncates_sampling and not rollout.replays_support,
        reads_text=bool(rollout.stop_texts),
        reads_images=has_vision_tower(settings.model, if_absent=False),
        releases_memory=settings.offload(device).rollout,
        cache_gib=settings.vllm.vllm_cpu_cache_gib,
    )
