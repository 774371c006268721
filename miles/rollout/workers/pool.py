"""The generation workers as the rollout process sees them: which group is where, and what every worker must know.

::

    the rollout process                                   a generation worker (worker.py), one of several
    PromptStream, order, filters' counts, checkpoints     generate, score, filter: produce_group()
    WorkerPool.produce ── Produce, Cancel, Hold ────────> GenerationWorker.deliver
               one future per ticket <── Produced, Failed ── GenerationWorker.collect
    Engine ────────────── Show, Ask ────────────────────> its requests to the servers

A ticket is one order of one group. It is with one worker at once, and its first result is its only one: so a group is
neither lost nor counted twice, whichever worker dies. A group is sent again with its own seeds.

A worker is lost when its process ends or shows no sign of life. With ``--use-fault-tolerance`` another one replaces it,
and its groups go to those that live; otherwise whoever waits for a group gets the error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from miles.base.profiling import ProcessTrace
from miles.base.threads import cancel_all
from miles.engine.base import SenderConfig, SharesServers
from miles.rollout.groups import GroupSpec, ProducedGroup
from miles.rollout.workers import messages
from miles.types.sample import PromptGroup

START_TRIES = 3  # in a row, of one worker
GROUP_TRIES = 4  # workers that a group may be lost with
INSTEAD = "with --use-fault-tolerance it would be replaced"

log = logging.getLogger(__name__)


class WorkerLost(RuntimeError):
    """A worker's process has ended, or shows no sign of life. The message states how, without its name."""


class WorkerProcess(Protocol):
    """A generation worker in a separate process. Every method raises ``WorkerLost`` when it is lost."""

    async def prepare(self) -> None:
        """Wait until the worker is built. Raises ``ValueError`` and the like if it cannot be."""

    async def deliver(self, sent: bytes) -> None:
        """Have it take messages in; ``GenerationWorker.deliver``."""

    async def collect(self) -> bytes:
        """Return its messages; ``GenerationWorker.collect``."""

    async def close(self) -> None:
        """Have it stop what runs, and end it."""

    def kill(self) -> None:
        """End it at once, whatever it does."""


StartWorker = Callable[[int, SenderConfig], WorkerProcess]  # start worker ``number``, with a way to the servers


@dataclass(eq=False)
class _Order:
    """One group that is being produced."""

    ticket: int
    drawn: PromptGroup
    spec: GroupSpec
    result: asyncio.Future[ProducedGroup]
    losses: int = 0  # workers that were lost with it


@dataclass(eq=False)
class _Worker:
    """One life of a worker: the groups that it was sent, and the messages on their way."""

    name: str
    process: WorkerProcess
    orders: dict[int, _Order] = field(default_factory=dict)  # by ticket
    outbox: list[Any] = field(default_factory=list)  # messages; a future is resolved when those before are delivered
    news: asyncio.Event = field(default_factory=asyncio.Event)
    answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    lost: bool = False

    def send(self, message: Any) -> None:
        self.outbox.append(message)
        self.news.set()

    def delivery_of(self, message: Any) -> asyncio.Future[int]:
        """Send a message; return a future that is resolved when the worker has taken it in, or is lost."""
        self.send(message)
        delivered: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.send(delivered)
        return delivered

    def answer_to(self, number: int, question: messages.Question) -> asyncio.Future[Any]:
        """Ask; return the future answer."""
        self.answers[number] = asyncio.get_running_loop().create_future()
        self.send(messages.Ask(number, question))
        return self.answers[number]

    async def deliver(self) -> None:
        """Send the messages in the outbox, one batch after the other."""
        while True:
            await self.news.wait()
            batch, self.outbox = self.outbox, []
            self.news.clear()
            delivered = [message for message in batch if isinstance(message, asyncio.Future)]
            try:
                sent = self._encode([message for message in batch if not isinstance(message, asyncio.Future)])
                await self.process.deliver(sent)
            finally:
                for future in delivered:
                    if not future.done():
                        future.set_result(0)

    def _encode(self, batch: list[Any]) -> bytes:
        """Return messages as sent, the orders of one kind together: they share a specification."""
        sent: list[Any] = []
        for spec, alike in itertools.groupby(batch, lambda m: m.spec if isinstance(m, _Order) else None):
            if spec is None:
                sent += alike
                continue
            orders = [order for order in alike if order.ticket in self.orders]  # others were withdrawn since
            if orders:
                drawn = tuple((order.ticket, order.drawn) for order in orders)
                sent.append(messages.Produce(replace(spec, group_filter=None), drawn))
        return messages.encode(sent, "a prompt")

    async def collect(self, check_servers: Callable[[messages.CheckServers], object]) -> None:
        """Receive its messages; pass on those that ask for a check of the servers."""
        while True:
            for message in messages.decode(await self.process.collect()):
                match message:
                    case messages.Produced():
                        self._take_in(message)
                    case messages.Failed():
                        self._settle(message.ticket, messages.decode_error(message.error))
                    case messages.Answered():
                        answer = self.answers.pop(message.number)
                        if not answer.done():
                            answer.set_result(message.value)
                    case messages.CheckServers():
                        check_servers(message)
                    case _:
                        raise AssertionError(f"a message of type {type(message).__name__}")

    def _take_in(self, message: messages.Produced) -> None:
        order = self.orders.get(message.ticket)
        if order is None:  # withdrawn meanwhile
            return
        result: messages.GroupResult = messages.decode(message.result)
        if result.metadata is not None:
            metadata = order.drawn.prompt.metadata
            metadata.clear()
            metadata.update(result.metadata)
        produced = messages.unpack(result.packed, order.drawn.prompt)
        del self.orders[message.ticket]
        if not order.result.done():
            order.result.set_result(produced)

    def _settle(self, ticket: int, error: Exception) -> None:
        order = self.orders.pop(ticket, None)
        if order is not None and not order.result.done():
            order.result.set_exception(error)

    def end(self) -> list[_Order]:
        """Wait for nothing of it any more; return the groups that it had."""
        for waiting in [*self.answers.values(), *(m for m in self.outbox if isinstance(m, asyncio.Future))]:
            if not waiting.done():
                waiting.set_result(0)
        orders, self.orders = list(self.orders.values()), {}
        return orders


class _Orders:
    """Which worker has which order, and the orders that wait for a worker.

    Args:
        workers: The workers that take orders, by number; shared with the pool, which adds and removes them.
    """

    def __init__(self, workers: dict[int, _Worker]) -> None:
        self._workers = workers
        self._waiting: list[_Order] = []  # all workers are being replaced
        self.failure: Exception | None = None

    def place(self, orders: Iterable[_Order]) -> None:
        """Give each order to the worker with the fewest."""
        for order in orders:
            if not self._workers:
                self._waiting.append(order)
                continue
            worker = min(self._workers.values(), key=lambda worker: len(worker.orders))
            worker.orders[order.ticket] = order
            worker.send(order)

    def place_waiting(self) -> None:
        """Give the orders that wait to the workers that there are now."""
        waiting, self._waiting = self._waiting, []
        self.place(waiting)

    def withdraw(self, order: _Order) -> None:
        """Have nobody produce it any more."""
        if order in self._waiting:
            self._waiting.remove(order)
        for worker in self._workers.values():
            if worker.orders.pop(order.ticket, None) is not None:
                worker.send(messages.Cancel((order.ticket,)))

    def fail(self, error: Exception, lost: Iterable[_Order] = ()) -> None:
        """Raise ``error`` from every call of ``WorkerPool.produce``, now and later; ``lost`` are with no worker."""
        self.failure = self.failure or error
        for order in [*lost, *self._waiting, *(o for worker in self._workers.values() for o in worker.orders.values())]:
            if not order.result.done():
                order.result.set_exception(error)
        self._waiting = []

    def cancel(self) -> None:
        """Cancel all orders, at the end."""
        for order in [*self._waiting, *(order for worker in self._workers.values() for order in worker.end())]:
            order.result.cancel()
        self._waiting = []


class WorkerPool:
    """Produces groups in worker processes (``--num-rollout-workers``).

    It is also the engine's ``RemoteSenders``: the requests of all workers.

    Args:
        start_worker: Starts the process of a worker.
        count: How many there are.
        engine: The engine whose servers they use.
        replaces: Whether a worker that is lost is replaced (``--use-fault-tolerance``).
    """

    def __init__(self, start_worker: StartWorker, count: int, engine: SharesServers, replaces: bool) -> None:
        self._start_worker = start_worker
        self._count = count
        self._engine = engine
        self._replaces = replaces
        self._workers: dict[int, _Worker] = {}  # those that take orders, by number
        self._orders = _Orders(self._workers)
        self._seen: Any = None  # the servers, as the engine has shown them
        self._holds = False
        self._tickets = itertools.count()
        self._questions = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start the workers at the same time.

        Raises:
            ValueError: What their settings name is not there.
            RuntimeError: A worker is lost while it starts.
        """
        await self._engine.share(self)
        starts = [asyncio.ensure_future(self._start(number)) for number in range(self._count)]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await cancel_all(starts)
            await self.close()
            raise

    async def _start(self, number: int) -> None:
        name = f"generation worker {number}"
        for attempt in range(1, START_TRIES + 1):
            process = self._start_worker(number, self._engine.sender_config())
            try:
                await process.prepare()
                break
            except WorkerLost as lost:
                process.kill()
                if attempt == START_TRIES or not self._replaces:
                    raise RuntimeError(f"{name} {lost} while it started") from lost
                log.warning("%s %s while it started; trying again", name, lost)
            except BaseException:
                process.kill()
                raise
        worker = _Worker(name, process)
        self._workers[number] = worker
        worker.send(messages.Show(self._seen))
        if self._holds:
            worker.send(messages.Hold(True))
        collect = worker.collect(lambda message: self._keep(self._check_servers(worker, message)))
        for work in (worker.deliver(), collect):
            worker.tasks.append(self._keep(self._guarded(number, worker, work)))
        self._orders.place_waiting()

    # Groups

    async def produce(self, drawn: PromptGroup, spec: GroupSpec) -> ProducedGroup:
        """Do the same as ``produce_group``, in a worker, with its own tools."""
        if self._orders.failure is not None:
            raise self._orders.failure
        order = _Order(next(self._tickets), drawn, spec, asyncio.get_running_loop().create_future())
        self._orders.place([order])
        try:
            return await order.result
        except asyncio.CancelledError:
            self._orders.withdraw(order)
            raise

    async def _check_servers(self, worker: _Worker, asked: messages.CheckServers) -> None:
        error = None
        try:
            await self._engine.check_servers()
        except Exception as failure:  # the worker's request fails with it
            error = messages.encode_error(failure, "the rollout process")
        worker.send(messages.Checked(asked.number, error))

    # Losses

    async def _guarded(self, number: int, worker: _Worker, work: Coroutine[Any, Any, None]) -> None:
        """Do the work of one direction until the worker is lost, or the work fails."""
        try:
            await work
        except Exception as error:  # the worker is lost, or a prompt cannot be sent, for instance
            if not worker.lost and not self._closed:
                worker.lost = True
                self._keep(self._after_loss(number, worker, error))

    async def _after_loss(self, number: int, worker: _Worker, cause: Exception) -> None:
        del self._workers[number]
        worker.process.kill()
        for task in worker.tasks:
            task.cancel()
        orders = worker.end()
        if not isinstance(cause, WorkerLost):  # it cannot be talked to any more: nobody may wait for it
            self._orders.fail(cause, orders)
            return
        if not self._replaces:
            self._orders.fail(RuntimeError(f"{worker.name} {cause}; {INSTEAD}"), orders)
            return
        for order in orders:
            order.losses += 1
            if order.losses == GROUP_TRIES:
                prompt = order.drawn.prompt.source or f"group {order.drawn.group_index}"
                self._orders.fail(
                    RuntimeError(f"{worker.name} {cause}, the {GROUP_TRIES}th one with {prompt} in it"), orders
                )
                return
        log.warning("%s %s; it is replaced, and its %d groups are generated again", worker.name, cause, len(orders))
        self._orders.place(orders)
        try:
            await self._start(number)
        except Exception as error:
            self._orders.fail(error)

    # What every worker must know

    async def show(self, state: Any) -> None:
        """Tell every worker about the engine's servers; ``RemoteSenders.show``."""
        self._seen = state
        await self._tell(messages.Show(state))

    async def interrupt(self) -> None:
        """Interrupt the responses that are trained on, as ``InterruptibleEngine`` does; return when none is in flight.

        Every worker begins no such request from now on.
        """
        self._holds = True
        await self._tell(messages.Hold(True))
        await self._engine.abort()

    def continue_generation(self) -> None:
        """Have every worker continue."""
        self._holds = False
        for worker in self._workers.values():
            worker.send(messages.Hold(False))

    async def _tell(self, message: Any) -> None:
        """Return when every worker has taken the message in, or is lost: its successor begins with the newest."""
        if self._workers:
            await asyncio.wait([worker.delivery_of(message) for worker in self._workers.values()])

    async def abort_all(self) -> None:
        """Have every worker end its requests; ``RemoteSenders.abort_all``."""
        await self._ask(messages.Question.ABORTED)

    async def in_flight(self) -> int:
        """Return how many requests all workers have in flight."""
        return sum(await self._ask(messages.Question.IN_FLIGHT))

    async def start_profile(self) -> None:
        """Have every worker record its work."""
        await self._ask(messages.Question.RECORD)

    async def stop_profile(self) -> list[ProcessTrace]:
        """Return the recording of each worker; nothing of one that replaced another meanwhile."""
        return [trace for trace in await self._ask(messages.Question.RECORDED) if isinstance(trace, ProcessTrace)]

    async def _ask(self, question: messages.Question) -> list[Any]:
        workers = sorted(self._workers.items())  # they were added as their processes became ready
        return list(await asyncio.gather(*(worker.answer_to(next(self._questions), question) for _, worker in workers)))

    def loads(self) -> dict[str, int]:
        """Return how many groups each worker has, for the report of a hang."""
        return {f"groups in {worker.name}": len(worker.orders) for worker in list(self._workers.values())}

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End the workers. No call may follow."""
        self._closed = True
        self._orders.cancel()
        workers = list(self._workers.values())
        self._workers.clear()
        await cancel_all(self._tasks)
        await asyncio.gather(*(worker.process.close() for worker in workers), return_exceptions=True)
