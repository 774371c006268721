"""Place the engine of a run in Ray: an actor for each of its servers, and the GPU that weights are sent from."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from miles.base.processes import RUN_FOLDER
from miles.base.stacks import answer_requests
from miles.config.settings import Settings
from miles.engine.base import ServerFailed, ServerProcess
from miles.rollout.workers.pool import WorkerLost
from miles.run.cpu_tuning import importing
from miles.run.liveness import DEATHS, HEARTBEAT_SECONDS, WorkerActor, how_it_died, with_heartbeat
from miles.run.local_access import private_session_root
from miles.run.run_guard import RunGuard
from miles.run.session import Placement

if TYPE_CHECKING:
    import torch

    from miles.engine.base import SenderConfig
    from miles.engine.weight_sync.deltas import CopySource, WeightFolder
    from miles.rollout.workers.worker import GenerationWorker, WorkerPlan

STOP_SECONDS = 15.0  # for a server to end, which takes it a few

log = logging.getLogger(__name__)


class EngineActor:
    """Hold one server process, on the node and the devices that Ray gives it. The server dies with the actor."""

    def __init__(self, build: Callable[[str], ServerProcess], host: str | None, gpus: tuple[str, ...] = ()) -> None:
        """Show the server ``gpus`` of this node, if any are named; Ray shows this process one of them only."""
        answer_requests()
        # A joined cluster has no guard on this host. This one removes the server's leftovers when this process ends.
        self._guard = None if RUN_FOLDER in os.environ else RunGuard(private_session_root(), is_detached=True)
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self.server = build(host or ray.util.get_node_ip_address())

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of ``ServerProcess``."""
        return getattr(self.server, method)(*arguments)

    def update_copy(self, source: CopySource) -> WeightFolder:
        """Bring this host's copy of the weights up to date; ``miles.engine.base.Server.update_copy``."""
        if self._guard is not None and source.copies is None:
            # Engines of a host share the copy, so it is not in a guard's folder.
            source = replace(source, copies=tempfile.gettempdir())
        return source.update_copy()


@dataclass(eq=False)
class ActorServer:
    """Run a server in an actor; ``miles.engine.base.Server``. An actor that died or hangs is replaced.

    Attributes:
        name: Its name in messages.
        build: Makes the server on the actor, given the address to listen on.
        options: Ray's options of the actor.
        host: The address to listen on; None for the address of the actor's node.
        start_seconds: How long the server may take to start. The actor is given twice as long.
        gpus: The GPUs of the server; empty for those that Ray gives the actor.
    """

    name: str
    build: Callable[[str], ServerProcess]
    options: dict[str, Any]
    host: str | None
    start_seconds: float
    gpus: tuple[str, ...] = ()
    _actor: Any = None  # until it starts
    _serves: bool = False

    async def meeting_address(self) -> str:
        """Return an address of the actor's node; ``ServerPart.meeting_address``."""
        address: str = await self._answer("it started", "call", "meeting_address")
        return address

    async def start(self, meeting: str | None = None) -> str:
        """Start the server, and its actor if there is none; ``ServerPart.start``."""
        url: str = await self._answer("it started", "call", "start", meeting)
        self._serves = True
        return url

    async def update_copy(self, source: CopySource) -> WeightFolder:
        """Have the actor update the copy of its host; ``Server.update_copy``."""
        assert self._actor is not None, "a server in use has an actor"
        folder: WeightFolder = await self._answer("its host read new weights", "update_copy", source)
        return folder

    async def _answer(self, doing: str, method: str, *arguments: Any) -> Any:
        """Call a method of the actor, which starts if there is none, and return its result.

        Raises:
            ServerFailed: The actor died, or took longer than a start may take, while ``doing``.
        """
        if self._actor is None:
            self._actor = ray.remote(EngineActor).options(**self.options).remote(self.build, self.host, self.gpus)
        seconds = 2 * self.start_seconds
        try:
            async with asyncio.timeout(seconds):
                return await getattr(self._actor, method).remote(*arguments)
        except RayTaskError as error:
            raise error.cause from None  # the server's own error, without the actor around it
        except DEATHS as death:
            raise ServerFailed(f"{self.name} was killed while {doing}") from death
        except TimeoutError:
            message = f"{self.name} has not answered within {seconds:g} s while {doing}: its host hangs"
            raise ServerFailed(message) from None

    async def ending(self) -> str:
        """Return what has ended the server; ``Server.ending``. It dies with its actor."""
        if self._actor is None or not self._serves:
            return ""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                how: str = await self._actor.call.remote("ending")
        except DEATHS as death:
            return f"with its actor, which died ({how_it_died(death)})"
        except TimeoutError:  # its host hangs, or the actor is stopped
            return ""
        return how

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
                    await self._actor.call.remote("stop")
                return
            except (*DEATHS, TimeoutError) as lost:
                log.info("%s: its actor is replaced: %s", self.name, lost)
        ray.kill(self._actor)
        self._actor = None


class RayHost:
    """Place servers in actors on the devices of a run; ``miles.engine.base.EngineHost``."""

    def __init__(self, placement: Placement) -> None:
        self.device = placement.device
        self._placement = placement

    def place_server(
        self, number: int, build: Callable[[str], ServerProcess], start_seconds: float, node: int = 0
    ) -> ActorServer:
        """Place server ``number`` in its own actor; ``EngineHost.place_server``."""
        # A Ray session of our own is one host. In a cluster, other hosts must reach the server.
        host = None if self._placement.cluster.ray_address else "127.0.0.1"
        options = self._placement.engine_options(number, node)
        gpus = self._placement.engine_gpus(number, node)
        return ActorServer(f"engine {number}", build, options, host, start_seconds, gpus)

    def broadcast_device(self) -> torch.device:
        """Return this worker's own GPU if no engine is on it; else the CPU."""
        import torch  # not at the top: the launcher imports this module

        if self._placement.device == "cuda" and not self._placement.cluster.colocate:
            return torch.device("cuda", 0 if "CUDA_VISIBLE_DEVICES" in os.environ else int(ray.get_gpu_ids()[0]))
        return torch.device("cpu")


# Generation workers in Ray: an actor for each, on the rollout process's node, and its handle there.


NEW_OBJECTS = 20_000  # between two collections of garbage; Python's 700 cost a third of a worker's time
CLOSE_SECONDS = 8.0  # for programs and requests to end; the launcher gives the rollout process 20


class GenerationActor(WorkerActor):
    """Runs a ``GenerationWorker``, as an asyncio actor: its calls overlap.

    The constructor does nothing that can fail, since Ray turns its exceptions into the death of the actor.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        super().__init__()
        self._plan = plan
        self._built: GenerationWorker | None = None

    @property
    def _worker(self) -> GenerationWorker:
        assert self._built is not None, "prepare() comes first"
        return self._built

    async def prepare(self) -> None:
        """Build the worker. Raises the worker's errors."""
        with importing():  # not at the top: the launcher needs none of it
            from miles.rollout.workers.worker import GenerationWorker

            self._built = GenerationWorker(self._plan)
        # An answer is parsed into as many lists as tokens: by default every third one would start a collection.
        gc.set_threshold(NEW_OBJECTS, 10, 10)

    async def deliver(self, sent: bytes) -> None:
        """Take messages in; ``GenerationWorker.deliver``."""
        self._worker.deliver(sent)

    async def collect(self) -> bytes:
        """Return messages; ``GenerationWorker.collect``."""
        return await self._worker.collect()

    async def close(self) -> None:
        """Stop all activity. No call may follow."""
        if self._built is not None:
            await self._built.close()


class RayWorker:
    """A generation worker in an actor; ``miles.rollout.workers.pool.WorkerProcess``.

    It is lost when its process ends, and when it has shown no sign of life for ``seconds``.

    Args:
        actor: A ``GenerationActor``.
        seconds: How long it may be silent.
    """

    def __init__(self, actor: Any, seconds: float) -> None:
        self._actor = actor
        self._seconds = seconds
        self._loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        process = ""
        try:
            # A worker may take any time to be placed and to import.
            process = f"(process {await self._actor.heartbeat.remote(0.0)}) "
            while True:
                async with asyncio.timeout(HEARTBEAT_SECONDS + self._seconds):
                    await self._actor.heartbeat.remote(HEARTBEAT_SECONDS)
        except DEATHS as death:
            how = f"died ({how_it_died(death)})"
        except TimeoutError:
            how = (
                f"has shown no sign of life for {self._seconds:g} s: it was stopped, or code in it holds Python's lock "
                "(--worker-timeout)"
            )
        self._loss.set_result(f"{process}{how}")

    async def _result(self, call: ray.ObjectRef[Any]) -> Any:
        answer: asyncio.Future[Any] = asyncio.wrap_future(call.future())
        # Takes note of an error that nobody may wait for any more, such as one of an actor that was ended.
        answer.add_done_callback(lambda call: call.cancelled() or call.exception())
        await asyncio.wait([answer, self._loss], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            raise WorkerLost(self._loss.result())
        try:
            return answer.result()
        except RayTaskError as error:
            raise error.cause from error  # the worker's own error
        except DEATHS as death:
            raise WorkerLost(await self._loss) from death

    async def prepare(self) -> None:
        """Wait until the worker is built; ``WorkerProcess.prepare``."""
        await self._result(self._actor.prepare.remote())

    async def deliver(self, sent: bytes) -> None:
        """Have it take messages in; ``WorkerProcess.deliver``."""
        await self._result(self._actor.deliver.remote(sent))

    async def collect(self) -> bytes:
        """Return its messages; ``WorkerProcess.collect``."""
        messages: bytes = await self._result(self._actor.collect.remote())
        return messages

    async def close(self) -> None:
        """Have it stop all activity, and end it; ``WorkerProcess.close``."""
        with suppress(TimeoutError, WorkerLost, RayError):  # it is ended in any case
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._result(self._actor.close.remote())
        self.kill()

    def kill(self) -> None:
        """End it at once; ``WorkerProcess.kill``."""
        self._watching.cancel()
        ray.kill(self._actor)


def worker_starter(
    settings: Settings, placement: Placement, tokenizer: Any
) -> Callable[[int, SenderConfig], RayWorker]:
    """Return the function that starts a worker; ``miles.rollout.workers.pool.StartWorker``."""
    from miles.rollout.workers.worker import WorkerPlan, pickled  # not at the top: the launcher imports this module

    sent = pickled(tokenizer)
    actor = with_heartbeat(GenerationActor).options(**placement.generation_worker_options())

    def start(number: int, sender_config: SenderConfig) -> RayWorker:
        plan = WorkerPlan(settings, number, sender_config, sent)
        return RayWorker(actor.remote(plan), settings.cluster.worker_timeout)

    return start
