"""SGLang servers in Ray actors, one an engine, and the engine that is made of them."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from transformers import AutoConfig, GenerationConfig

from miles.arguments.settings import Settings
from miles.cluster.session import Placement
from miles.engine.sglang.child_process import ServerFailed
from miles.engine.sglang.engine_pool import Server
from miles.engine.sglang.external_server import ExternalServer
from miles.engine.sglang.router import Router
from miles.engine.sglang.sglang_command import ServerSpec
from miles.engine.sglang.sglang_engine import SglangEngine
from miles.engine.sglang.sglang_server import START_SECONDS, SglangServer
from miles.engine.stop_tokens import eos_token_ids
from miles.weight_sync.sender import WeightSender

LOGS = "engines"  # in --output-dir
STOP_SECONDS = 15.0  # for a server to end, which takes it a few


log = logging.getLogger(__name__)


class EngineActor:
    """Holds one server process, on the node and the devices that Ray gives it. The server dies with the actor."""

    def __init__(self, spec: ServerSpec, host: str | None, log: Path) -> None:
        self.server = SglangServer(spec, host or ray.util.get_node_ip_address(), log)

    def start(self) -> str:
        """As ``SglangServer.start``."""
        return self.server.start()

    def stop(self) -> None:
        """As ``SglangServer.stop``."""
        self.server.stop()


class ActorServer:
    """A server in an actor; ``miles.engine.sglang.engine_pool.Server``. An actor that died or hangs is replaced."""

    def __init__(self, number: int, settings: Settings, placement: Placement) -> None:
        self.name = f"engine {number}"
        self._options = placement.engine_options(number)
        # A Ray of our own is one host; engines of a cluster must be reached from others.
        self._host = None if settings.cluster.ray_address else "127.0.0.1"
        self._log = Path(settings.tracking.output_dir).absolute() / LOGS / f"engine_{number}.log"
        self._spec = server_spec(settings, placement.device, number)
        self._actor: Any = None
        self._serves = False

    async def start(self) -> str:
        if self._actor is None:
            self._actor = ray.remote(EngineActor).options(**self._options).remote(self._spec, self._host, self._log)
        try:
            async with asyncio.timeout(2 * START_SECONDS):  # twice what it gives its server
                url = await self._actor.start.remote()
        except RayTaskError as error:
            raise error.cause from None  # the server's own error, without the actor around it
        except RayActorError as death:
            raise ServerFailed(f"{self.name} was killed while it started") from death
        except TimeoutError:
            raise ServerFailed(f"{self.name} has not started within {2 * START_SECONDS} s: its host hangs") from None
        self._serves = True
        return url

    async def stop(self) -> None:
        """As ``Server.stop``. An actor that starts its server hears nothing else until it is there: it is killed, and
        so is one that does not answer; the server goes with it."""
        if self._actor is None:
            return
        if self._serves:
            self._serves = False
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._actor.stop.remote()
                return
            except (RayActorError, TimeoutError) as lost:
                log.info("%s: its actor is replaced: %s", self.name, lost)
        ray.kill(self._actor)
        self._actor = None


def server_spec(settings: Settings, device: str, number: int) -> ServerSpec:
    """What engine ``number`` serves. Engines differ in their seeds only."""
    assert settings.model.hf_checkpoint is not None
    return ServerSpec(
        model_path=settings.model.hf_checkpoint,
        dtype="bfloat16" if settings.training.bf16 else "float32",
        device=device,
        num_devices=settings.sglang.rollout_num_gpus_per_engine,
        seed=settings.data.rollout_seed + number,
        flags=settings.server_flags.server,
        releases_memory=settings.offload(device).rollout,
    )


def build_sglang_engine(settings: Settings, placement: Placement) -> SglangEngine:
    """The engine of a run, not started yet: its own servers in actors, or those at the given addresses."""
    output_dir = Path(settings.tracking.output_dir).absolute()
    servers: list[Server] = [ActorServer(number, settings, placement) for number in range(settings.num_engines)]
    servers += [ExternalServer(address) for address in settings.sglang.rollout_external_engine_addrs or ()]
    router = None
    if len(servers) > 1:
        requests = settings.sglang.sglang_server_concurrency * len(servers)
        router = Router(settings.server_flags.router, "127.0.0.1", output_dir / LOGS / "router.log", requests)
    assert settings.model.hf_checkpoint is not None
    vocab_size = AutoConfig.from_pretrained(settings.model.hf_checkpoint).get_text_config().vocab_size
    sender = WeightSender(settings.sglang, output_dir, broadcast_device(placement))
    eos = eos_ids(settings.model.hf_checkpoint)
    silence_seconds = settings.cluster.worker_timeout
    return SglangEngine(servers, settings.sglang, vocab_size, sender, router, eos, silence_seconds)


def eos_ids(model: str) -> frozenset[int]:
    """The stop tokens of the model's generation config, else of its config: what SGLang stops at."""
    try:
        return eos_token_ids(GenerationConfig.from_pretrained(model).eos_token_id)
    except OSError:  # it has none
        return eos_token_ids(AutoConfig.from_pretrained(model).get_text_config().eos_token_id)


def broadcast_device(placement: Placement) -> torch.device:
    """Where broadcasts start: on the worker's own GPU, over NCCL, where no engine is on it; else on the host."""
    if placement.device == "cuda" and not placement.cluster.colocate:
        return torch.device("cuda", 0 if "CUDA_VISIBLE_DEVICES" in os.environ else int(ray.get_gpu_ids()[0]))
    return torch.device("cpu")
