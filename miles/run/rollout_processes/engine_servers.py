"""Place the engine of a run in Ray: an actor for each of its servers, and the GPU that weights are sent from."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayTaskError

from miles.base.stacks import RUN_FOLDER, answer_requests
from miles.engine.host import ServerFailed, ServerProcess
from miles.run.failure_files.death import DEATHS
from miles.run.local_access import private_session_root
from miles.run.run_guard import RunGuard
from miles.run.session import Placement

if TYPE_CHECKING:
    import torch

    from miles.engine.weight_sync.local_copy import CopySource, WeightFolder

STOP_SECONDS = 15.0  # for a server to end, which takes it a few

log = logging.getLogger(__name__)


class EngineActor:
    """Hold one server process, on the node and the devices that Ray gives it. The server dies with the actor."""

    def __init__(self, build: Callable[[str], ServerProcess], host: str | None, gpus: tuple[str, ...] = ()) -> None:
        """Show the server ``gpus`` of this node, if any are named; Ray shows this process one of them only."""
        answer_requests()
        # A joined cluster has no guard on this host. This one removes what the server leaves when this process ends.
        self._guard = None if RUN_FOLDER in os.environ else RunGuard(private_session_root(), is_detached=True)
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self.server = build(host or ray.util.get_node_ip_address())

    def meeting_address(self) -> str:
        """Return an address of this host; ``ServerProcess.meeting_address``."""
        return self.server.meeting_address()

    def start(self, meeting: str | None = None) -> str:
        """Start the server; ``ServerProcess.start``."""
        return self.server.start(meeting)

    def stop(self) -> None:
        """Stop the server; ``ServerProcess.stop``."""
        self.server.stop()

    def update_copy(self, source: CopySource) -> WeightFolder:
        """Bring this host's copy of the weights up to date; ``miles.engine.host.Server.update_copy``."""
        if (
            self._guard is not None and source.copies is None
        ):  # engines of a host share the copy, so it is not in a guard's folder
            source = replace(source, copies=tempfile.gettempdir())
        return source.update_copy()


class ActorServer:
    """Run a server in an actor; ``miles.engine.host.Server``. An actor that died or hangs is replaced."""

    def __init__(
        self,
        number: int,
        build: Callable[[str], ServerProcess],
        options: dict[str, Any],
        host: str | None,
        start_seconds: float,
        gpus: tuple[str, ...] = (),
    ) -> None:
        """Prepare engine ``number``. Starts no actor.

        Args:
            number: Which server of the run.
            build: Makes the server on the actor, given the address to listen on.
            options: Ray's options of the actor.
            host: The address to listen on; None for that of the actor's node.
            start_seconds: How long the server may take to start. The actor is given twice as long.
            gpus: The GPUs of the server; empty for those that Ray gives the actor.
        """
        self.name = f"engine {number}"
        self._build = build
        self._options = options
        self._host = host
        self._gpus = gpus
        self._start_seconds = 2 * start_seconds
        self._actor: Any = None
        self._serves = False

    async def meeting_address(self) -> str:
        """Return an address of the actor's node; ``ServerPart.meeting_address``."""
        return await self._answer("meeting_address")

    async def start(self, meeting: str | None = None) -> str:
        """Start the server, and its actor if there is none; ``ServerPart.start``."""
        url = await self._answer("start", meeting)
        self._serves = True
        return url

    async def _answer(self, method: str, *arguments: Any) -> str:
        """Call a method of the actor, which starts if there is none, and return its result."""
        if self._actor is None:
            self._actor = ray.remote(EngineActor).options(**self._options).remote(self._build, self._host, self._gpus)
        try:
            async with asyncio.timeout(self._start_seconds):
                text: str = await getattr(self._actor, method).remote(*arguments)
        except RayTaskError as error:
            raise error.cause from None  # the server's own error, without the actor around it
        except DEATHS as death:
            raise ServerFailed(f"{self.name} was killed while it started") from death
        except TimeoutError:
            message = f"{self.name} has not started within {self._start_seconds:g} s: its host hangs"
            raise ServerFailed(message) from None
        return text

    async def stop(self) -> None:
        """Stop the server; ``Server.stop``.

        An actor that is starting its server answers nothing else, so it is killed, and so is one that does not answer.
        The server dies with it.
        """
        if self._actor is None:
            return
        if self._serves:
            self._serves = False
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._actor.stop.remote()
                return
            except (*DEATHS, TimeoutError) as lost:
                log.info("%s: its actor is replaced: %s", self.name, lost)
        ray.kill(self._actor)
        self._actor = None

    async def update_copy(self, source: CopySource) -> WeightFolder:
        """Have the actor update the copy of its host; ``Server.update_copy``."""
        assert self._actor is not None, "a server in use has an actor"
        try:
            async with asyncio.timeout(self._start_seconds):  # as loading a model may take
                folder: WeightFolder = await self._actor.update_copy.remote(source)
        except RayTaskError as error:
            raise error.cause from None
        except DEATHS as death:
            raise ServerFailed(f"{self.name} was killed while its host read new weights") from death
        except TimeoutError:
            message = f"{self.name}: its host has not read the new weights within {self._start_seconds:g} s"
            raise ServerFailed(message) from None
        return folder


class RayHost:
    """Place servers in actors on the devices of a run; ``miles.engine.host.EngineHost``."""

    def __init__(self, placement: Placement) -> None:
        self.device = placement.device
        self._placement = placement

    def place_server(
        self, number: int, build: Callable[[str], ServerProcess], start_seconds: float, node: int = 0
    ) -> ActorServer:
        """Place server ``number`` in an actor of its own; ``EngineHost.place_server``."""
        # A Ray session of our own is one host. In a cluster, other hosts must reach the server.
        host = None if self._placement.cluster.ray_address else "127.0.0.1"
        options, gpus = self._placement.engine_options(number, node), self._placement.engine_gpus(number, node)
        return ActorServer(number, build, options, host, start_seconds, gpus)

    def broadcast_device(self) -> torch.device:
        """Return this worker's own GPU if no engine is on it; else the CPU."""
        import torch  # not at the top: the launcher imports this module

        if self._placement.device == "cuda" and not self._placement.cluster.colocate:
            return torch.device("cuda", 0 if "CUDA_VISIBLE_DEVICES" in os.environ else int(ray.get_gpu_ids()[0]))
        return torch.device("cpu")
