"""Generation workers in Ray: an actor for each, on the rollout process's node, and its handle there."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from miles.base.stacks import answer_requests, own_stacks
from miles.config.settings import Settings
from miles.rollout.workers.pool import WorkerLost
from miles.run.cpu_tuning import importing
from miles.run.failure_files.death import DEATHS, how_it_died
from miles.run.liveness import HEARTBEAT, HEARTBEAT_SECONDS, REPORT, with_heartbeat
from miles.run.session import Placement

if TYPE_CHECKING:
    from miles.engine.base import SenderConfig
    from miles.rollout.workers.worker import GenerationWorker, WorkerPlan

NEW_OBJECTS = 20_000  # between two collections of garbage; Python's 700 cost a third of a worker's time
CLOSE_SECONDS = 8.0  # for programs and requests to end; the launcher gives the rollout process 20


class GenerationActor:
    """Runs a ``GenerationWorker``, as an asyncio actor: its calls overlap.

    The constructor does nothing that can fail, since Ray turns its exceptions into the death of the actor.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._built: GenerationWorker | None = None
        answer_requests()

    @property
    def _worker(self) -> GenerationWorker:
        assert self._built is not None, "prepare() comes first"
        return self._built

    async def prepare(self) -> None:
        """Build the worker. Raises what it raises."""
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
        """Stop what runs. No call may follow."""
        if self._built is not None:
            await self._built.close()

    @ray.method(concurrency_group=HEARTBEAT)
    async def heartbeat(self, seconds: float) -> int:
        """Answer a heartbeat, on an event loop of its own."""
        await asyncio.sleep(seconds)
        return os.getpid()

    @ray.method(concurrency_group=REPORT)
    async def describe(self) -> str:
        """Return the stacks of this process, for the report of a hang."""
        return own_stacks()


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
        answer.add_done_callback(_note_end)
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
        found: bytes = await self._result(self._actor.collect.remote())
        return found

    async def close(self) -> None:
        """Have it stop what runs, and end it; ``WorkerProcess.close``."""
        with suppress(TimeoutError, WorkerLost, RayError):  # it is ended in any case
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._result(self._actor.close.remote())
        self.kill()

    def kill(self) -> None:
        """End it at once; ``WorkerProcess.kill``."""
        self._watching.cancel()
        ray.kill(self._actor)


def _note_end(call: asyncio.Future[Any]) -> None:
    """Take note of the error of a call that nobody may wait for any more, such as one of an actor that was ended."""
    if not call.cancelled():
        call.exception()


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
