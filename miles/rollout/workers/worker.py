"""A generation worker: a process that generates, scores and filters groups for the rollout process."""

import asyncio
import itertools
import pickle
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from miles.base.host import memory_limit
from miles.base.profiling import Recorder, span
from miles.base.threads import cancel_all
from miles.base.tokenizer import load_tokenizer
from miles.base.user_code import limit_calls
from miles.config.settings import Settings
from miles.engine.base import Generation, GenerationRequest, RequestSender, SenderConfig, connect_teacher
from miles.rollout.chosen_generator import get_group_generator, session_generator
from miles.rollout.filters import load_group_filter
from miles.rollout.groups import GroupTools, produce_group
from miles.rollout.interruptible_engine import InterruptibleEngine
from miles.rollout.workers import messages
from miles.tasks.rewards.registry import get_reward_function
from miles.types.sample import PromptGroup

LINGER_SECONDS = 0.2  # for more groups to be sent with the first one; a batch costs each process about a millisecond
ENOUGH = 32  # groups that are sent without waiting for more


def share(total: int, count: int, number: int) -> int:
    """Return the share of worker ``number`` of ``count`` in something that is counted; the shares add up.

    >>> [share(10, 4, number) for number in range(4)]
    [3, 3, 2, 2]
    """
    return total // count + (number < total % count)


@dataclass(frozen=True)
class WorkerPlan:
    """The plan of a generation worker: its arguments at the start. It is pickled.

    Attributes:
        settings: The settings of the run.
        number: Which worker, from 0.
        sender_config: How requests reach the engine's servers.
        tokenizer: The tokenizer of the run, pickled: to load one by its path takes seconds, as it imports torch. None
            if it refuses; then it is loaded.
    """

    settings: Settings
    number: int
    sender_config: SenderConfig
    tokenizer: bytes | None

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"generation worker {self.number}"

    def share(self, total: int) -> int:
        """Return this worker's share; at least 1."""
        return max(1, share(total, self.settings.rollout.num_rollout_workers, self.number))


def pickled(tokenizer: Any) -> bytes | None:
    """Return ``tokenizer`` for ``WorkerPlan``; None if it cannot be pickled."""
    try:
        return pickle.dumps(tokenizer)
    except Exception:  # whatever its class does
        return None


class OnlyGenerates:
    """The engine as code in a worker sees it: the rest belongs to the rollout process."""

    def __init__(self, sender: RequestSender) -> None:
        self._sender = sender

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Return one ``Generation`` per seed; ``Engine.generate``."""
        return await self._sender.generate(request)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"engine.{name} is called in a generation worker (--num-rollout-workers), whose engine only generates; "
            "call it in a function that the rollout process calls (docs/engine.md), or drop --num-rollout-workers"
        )


class GenerationWorker:
    """Produces the groups that it is asked for. ``deliver`` takes messages and ``collect`` gives them, each in order.

    Must be built on the event loop that it is used on.

    Args:
        plan: What to be.

    Raises:
        ValueError: A reward or function is unknown, and the like.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        settings = plan.settings
        rollout, reward = settings.rollout, settings.reward
        workers = rollout.num_rollout_workers
        limit_calls(plan.share)
        if rollout.agent_command is not None:
            programs = replace(rollout, agent_concurrency=plan.share(rollout.agent_concurrency))
            settings = replace(settings, rollout=programs)
        self._name = plan.name
        self._agents = session_generator(settings)
        self._teacher = connect_teacher(settings, plan.share)
        self._sender = plan.sender_config.open(plan.share(plan.sender_config.requests), self._check_servers)
        engine: Any = OnlyGenerates(self._sender)
        self._interruptible = InterruptibleEngine(engine)
        if plan.tokenizer is None:
            tokenizer = load_tokenizer(str(settings.model.hf_checkpoint))
        else:
            tokenizer = pickle.loads(plan.tokenizer)
        self._tools = GroupTools(
            engine,
            tokenizer,
            self._agents or get_group_generator(rollout),
            get_reward_function(reward, memory_limit(reward.reward_memory) // workers, plan.share),
            reward.reward_error_value,
            reward.drops_errors,
        )
        trained: Any = self._interruptible if rollout.partial_rollout else engine
        self._training_tools = replace(self._tools, engine=trained, teacher=self._teacher)
        path = rollout.dynamic_sampling_filter_path
        self._filter = None if path is None else load_group_filter(path)
        self._recorder = Recorder(plan.name, operations=False)  # the code that runs here needs no torch
        self._producing: dict[int, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()  # answers that take time
        self._out: list[Any] = []
        self._news = asyncio.Event()  # there is something in _out
        self._hurry = asyncio.Event()  # there is something that others should not be waited for with
        self._checks: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count()

    # Messages

    def deliver(self, sent: bytes) -> None:
        """Take in messages, and start the work that they ask for."""
        with span("take messages in"):
            for message in messages.decode(sent):
                self._take(message)

    def _take(self, message: Any) -> None:
        match message:
            case messages.Produce():
                self._begin(message)
            case messages.Cancel():
                for ticket in message.tickets:
                    if ticket in self._producing:
                        self._producing[ticket].cancel()
            case messages.Show():
                self._sender.show(message.servers)
            case messages.Hold():
                if message.on:
                    self._interruptible.hold()
                else:
                    self._interruptible.continue_generation()
            case messages.Ask():
                self._keep(self._answer(message))
            case messages.Checked():
                checked = self._checks.pop(message.number)
                if checked.cancelled():
                    return
                if message.error is None:
                    checked.set_result(None)
                else:
                    checked.set_exception(messages.decode_error(message.error))
            case _:
                raise AssertionError(f"a message of type {type(message).__name__}")

    async def collect(self) -> bytes:
        """Return the messages that are ready, when there are any; groups wait a little for others to join them."""
        await self._news.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await self._hurry.wait()
        ready, self._out = self._out, []
        self._news.clear()
        self._hurry.clear()
        with span("encode messages"):
            return messages.encode(ready)

    def _send(self, message: Any) -> None:
        self._out.append(message)
        self._news.set()
        if not isinstance(message, messages.Produced) or len(self._out) >= ENOUGH or not self._producing:
            self._hurry.set()

    # Groups

    def _begin(self, order: messages.Produce) -> None:
        for ticket, drawn in order.drawn:
            task = asyncio.ensure_future(self._produce(ticket, drawn, order))
            self._producing[ticket] = task
            task.add_done_callback(partial(self._gone, ticket))

    def _gone(self, ticket: int, task: asyncio.Task[None]) -> None:
        self._producing.pop(ticket, None)  # it is still there if it was cancelled before it began

    async def _produce(self, ticket: int, drawn: PromptGroup, order: messages.Produce) -> None:
        trains = order.spec.trains
        spec = replace(order.spec, group_filter=self._filter) if trains else order.spec
        tools = self._training_tools if trains else self._tools
        metadata = drawn.prompt.metadata
        what = f"group {drawn.group_index} ({drawn.prompt.source})"
        try:
            before = messages.encode(metadata, what)
            produced = await produce_group(drawn, tools, spec)
            with span("pack a group"):
                changed = messages.encode(metadata, what) != before
                packed = messages.pack(produced, drawn.prompt)
                result = messages.GroupResult(packed, metadata if changed else None)
                message: Any = messages.Produced(ticket, messages.encode(result, what))
        except Exception as error:  # whatever user code raises
            message = messages.Failed(ticket, messages.encode_error(error, self._name))
        finally:
            self._producing.pop(ticket, None)
        self._send(message)

    # The questions that the engine's owner and this process ask each other

    async def _answer(self, ask: messages.Ask) -> None:
        answer: Any = 0
        match ask.question:
            case messages.Question.ABORTED:
                await self._sender.abort_all()
            case messages.Question.IN_FLIGHT:
                answer = self._sender.in_flight
            case messages.Question.RECORD:
                self._recorder.start()
            case messages.Question.RECORDED:
                answer = self._recorder.stop()
        self._send(messages.Answered(ask.number, answer))

    async def _check_servers(self) -> None:
        number = next(self._numbers)
        self._checks[number] = asyncio.get_running_loop().create_future()
        self._send(messages.CheckServers(number))
        await self._checks[number]

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    async def close(self) -> None:
        """Stop all activity: programs, requests, connections. No call may follow."""
        if self._agents is not None:
            await self._agents.close()
        await cancel_all([*self._producing.values(), *self._others])
        if self._teacher is not None:
            await self._teacher.close()
        await self._sender.close()
