"""The protocol of a generation engine. The rollout code knows engines by this protocol only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from miles.base.threads import in_thread
from miles.config.components import TEACHERS, call
from miles.types.weights import WeightChunk

if TYPE_CHECKING:
    import numpy as np
    import torch

    from miles.config.settings import Settings
    from miles.engine.weight_sync.deltas import CopySource, WeightFolder
    from miles.types.images import PromptImages
    from miles.types.replay import TokenSets
    from miles.types.sample import Sample

FinishReason = Literal["stop", "length", "abort"]


class EngineFailed(RuntimeError):
    """A server does not answer, and is not replaced. The message is the sentence that ends the run."""


@dataclass(frozen=True)
class SamplingParams:
    """Say how tokens are drawn.

    ``temperature`` 0 is greedy. ``top_k`` -1, ``top_p`` 1.0 and ``min_p`` 0.0 keep the whole vocabulary. With
    ``returns_support`` the engine returns the set that they kept for each token, with ``returns_experts`` the experts
    that each layer chose. ``stop_token_ids`` end a response and stay in it, as the model's end-of-sequence token does;
    so does the token that completes one of ``stop_texts``.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    min_p: float = 0.0
    returns_support: bool = False
    returns_experts: bool = False

    def check(self) -> None:
        """Raise ``ValueError`` for a value outside its range."""
        rules = (
            ("--rollout-max-response-len", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1"),
            ("--rollout-temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("--rollout-top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1 (1 keeps all)"),
            ("--rollout-top-k", self.top_k, self.top_k == -1 or self.top_k >= 1, "-1 (all) or at least 1"),
            ("--rollout-min-p", self.min_p, 0 <= self.min_p <= 1, "from 0 (keeps all) to 1"),
        )
        for flag, value, holds, rule in rules:
            if not holds:
                raise ValueError(f"{flag} {value}: must be {rule}")


@dataclass(frozen=True)
class GenerationRequest:
    """Ask for one response per seed to one prompt. The prompt is prefilled once.

    A response is a function of weights, prompt, sampling and its seed: the same seed repeats it exactly, if the engine
    honours seeds.
    """

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: SamplingParams
    images: PromptImages | None = None  # replace the placeholders in ``prompt_ids``

    def check(self, vocab: int) -> None:
        """Raise ``ValueError`` for an empty prompt, a token outside ``vocab``, or sampling values out of range."""
        self.sampling.check()
        if not self.prompt_ids:
            raise ValueError("an empty prompt cannot be continued: give each prompt at least one token")
        outside = [token for token in self.prompt_ids if not 0 <= token < vocab]
        if outside:
            raise ValueError(
                f"prompt token id {outside[0]} is outside the model's vocabulary of {vocab}: "
                "use the tokenizer of --hf-checkpoint"
            )


@dataclass(frozen=True)
class Generation:
    """Hold one response.

    Attributes:
        token_ids: The sampled tokens.
        log_probs: Their fp32 log-probs under softmax(logits / temperature): over ``support`` if that was asked for,
            else over the full vocabulary, before top-k, top-p and min-p; under the raw logits if greedy.
        finish_reason: ``stop`` (a stop token), ``length`` (``max_new_tokens``) or ``abort``.
        weight_version: The version of the weights that generated the last token.
        earlier_versions: If the weights changed during the response: a (version, tokens) pair for each run of tokens
            before the tokens of ``weight_version``, oldest first.
        support: The set that each token was drawn from, if ``returns_support`` asked for it.
        experts: The experts of each layer for the tokens of prompt and response but the last, [positions, layers, k],
            if ``returns_experts`` asked for them (``miles/types/replay.py``).

    >>> Generation([5, 6, 7], [-1.0, -1.0, -1.0], "stop", weight_version=4, earlier_versions=((3, 2),)).token_versions
    [3, 3, 4]
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weight_version: int
    earlier_versions: tuple[tuple[int, int], ...] = ()
    support: TokenSets | None = None
    experts: np.ndarray | None = field(default=None, compare=False)

    @property
    def token_versions(self) -> list[int]:
        """The version of the weights that generated each token, one per token."""
        versions = [version for version, tokens in self.earlier_versions for _ in range(tokens)]
        return versions + [self.weight_version] * (len(self.token_ids) - len(versions))


class Engine(Protocol):
    """Generate text. All methods are coroutines of one event loop; ``generate`` may be called concurrently."""

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Return one ``Generation`` per seed, in order. Raises ``ValueError`` for a token id outside the vocabulary."""

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        """Replace the weights. Raises ``ValueError`` naming the parameters that are missing or unknown.

        An engine of several servers may iterate ``chunks`` again, until the next update, for a server that restarts.
        """

    async def abort(self) -> None:
        """End every request in flight now. Each returns its tokens so far, with finish_reason ``abort``."""

    async def close(self) -> None:
        """Release everything that the engine holds. No call may follow."""


@runtime_checkable
class ReleasesMemory(Protocol):
    """An optional capability of an engine: give its GPU memory to the trainer between two weight updates."""

    async def release_memory(self) -> None:
        """Release the memory of weights and cache until the next ``update_weights``.

        Raises ``RuntimeError`` if requests are in flight.
        """


class RemoteSenders(Protocol):
    """Other processes that send requests to the servers of an engine, all of them together."""

    async def show(self, state: Any) -> None:
        """Give every process the state of the servers; return when each has it. Calls take effect in order."""

    async def abort_all(self) -> None:
        """Have every process send nothing of what was asked for before; return when all it had sent has ended."""

    async def in_flight(self) -> int:
        """Return how many requests have been sent and not answered."""


class RequestSender(Protocol):
    """Sends requests to the servers of an engine that another process has; as an engine, it only generates."""

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Return one ``Generation`` per seed, as ``Engine.generate`` does."""

    def show(self, state: Any) -> None:
        """Take in the engine's report on the servers. Requests wait for the first time."""

    async def abort_all(self) -> None:
        """Send nothing of what was asked for before; return when all that was sent has ended."""

    @property
    def in_flight(self) -> int:
        """How many requests have been sent and not answered."""

    async def close(self) -> None:
        """Close the connections. No call may follow."""


class SenderConfig(Protocol):
    """What another process needs to send requests. It is pickled."""

    requests: int  # at once, of all processes together

    def open(self, requests: int, check_servers: Callable[[], Awaitable[None]]) -> RequestSender:
        """Return what sends up to ``requests`` at once; it calls ``check_servers`` after a failed try."""


@runtime_checkable
class SharesServers(Protocol):
    """An optional capability of an engine: other processes send requests to its servers too."""

    def sender_config(self) -> SenderConfig:
        """Return what such a process needs."""

    async def share(self, senders: RemoteSenders) -> None:
        """Show ``senders`` the servers from now on, and abort their requests with the engine's own."""

    async def check_servers(self) -> None:
        """After a failed request: find the servers that do not work, and wait for an update in progress."""

    async def abort(self) -> None:
        """Abort all requests; ``Engine.abort``."""


@runtime_checkable
class HasQueues(Protocol):
    """An optional capability of an engine: say how many requests wait and run, for the report of a hang."""

    def queue_lengths(self) -> dict[str, int]:
        """Return a number for each queue. May be called from another thread."""


class ServedTeacher(Protocol):
    """Servers that score samples for distillation (``--opd-type server``)."""

    async def score(self, samples: Sequence[Sample]) -> None:
        """Give every sample the ``teacher_log_probs`` of its response.

        Raises:
            ValueError: A prompt names no teacher, or a server refuses the request or has another vocabulary.
        """

    async def close(self) -> None:
        """Close the connections. No call may follow."""


def connect_teacher(settings: Settings, share: Callable[[int], int] = lambda total: total) -> ServedTeacher | None:
    """Return the servers that score samples; None if the run has none.

    Args:
        settings: The run, whose objective names the servers.
        share: Returns how many of the requests that a run may have in flight are this process's.
    """
    if not settings.loss.teacher_is_served:
        return None
    teacher: ServedTeacher = call(TEACHERS["server"], settings, share)
    return teacher


async def start_engine(settings: Settings, host: EngineHost) -> Engine:
    """Build and start the engine that ``--rollout-engine`` names.

    Raises:
        ValueError: If no engine has this name, or the engine refuses the settings.
    """
    engine: Engine = await call(settings.engine.builder, settings, host)
    return engine


# The protocol of the run towards its engine: it offers devices, and starts server processes.
#
# The cluster implements ``EngineHost``; engines never see Ray. ``LocalHost`` implements it in one process, without
# Ray.


class ServerFailed(RuntimeError):
    """A server process ended, or hung, before it served."""


class ServerProcess(Protocol):
    """Start and stop one server, or its part of one node, on the host where this object is."""

    def meeting_address(self) -> str:
        """Return an address of this host, HOST:PORT, at which the parts of a server can meet."""

    def start(self, meeting: str | None = None) -> str:
        """Start the server, wait until it serves, and return its URL. Raises ``ServerFailed`` if it does not.

        ``meeting`` is the address at which it meets the parts on other nodes, if it has any.
        """

    def ending(self) -> str:
        """Return which signal or exit code has ended the server since it served, as words; "" if it runs."""

    def stop(self) -> None:
        """End the server. Does nothing if it does not run."""


class Server(Protocol):
    """Start and stop one server from afar, for instance in an actor. ``name`` is how messages call it."""

    name: str

    async def start(self) -> str:
        """Start the server if it does not run, wait until it serves, and return its URL."""

    async def ending(self) -> str:
        """Return which signal or exit code has ended the server since it served; "" if it runs, or nobody knows."""

    async def stop(self) -> None:
        """End the server, whatever state it is in."""

    async def update_copy(self, source: CopySource) -> WeightFolder:
        """Bring the copy of the weights on the server's host up to date, and return it.

        Raises ``DeltaRefused`` if the host needs all weights, and ``ServerFailed`` if it does not answer.
        """


class ServerPart(Server, Protocol):
    """The process of one node of a server, seen from afar: a whole server, if it has one node."""

    async def meeting_address(self) -> str:
        """Return an address of its host; ``ServerProcess.meeting_address``."""

    async def start(self, meeting: str | None = None) -> str:
        """Start the process if it does not run; ``ServerProcess.start``."""


class EngineHost(Protocol):
    """Place an engine. ``device`` (cpu or cuda) is the one that the run computes on."""

    device: str

    def place_server(
        self, number: int, build: Callable[[str], ServerProcess], start_seconds: float, node: int = 0
    ) -> ServerPart:
        """Place the part of server ``number`` that is on its node ``node``, on separate devices.

        Args:
            number: Which server of the run, from 0.
            build: Makes the server's process, given the address that it should listen on. It is pickled.
            start_seconds: How long one start may take.
            node: Which of the nodes that the server spans, from 0.
        """

    def broadcast_device(self) -> torch.device:
        """Return the device that broadcasts weights to servers: a GPU that no server uses, or the CPU."""


class LocalServer:
    """Start and stop a server from the event loop."""

    def __init__(self, number: int, process: ServerProcess) -> None:
        self.name = f"engine {number}"
        self._process = process

    async def meeting_address(self) -> str:
        """Return an address of this machine; ``ServerPart.meeting_address``."""
        return self._process.meeting_address()

    async def start(self, meeting: str | None = None) -> str:
        """Start the server in a thread, since that takes long; ``ServerPart.start``."""
        return await in_thread(self._process.start, meeting)

    async def ending(self) -> str:
        """Return what has ended it; ``Server.ending``."""
        return await in_thread(self._process.ending)

    async def stop(self) -> None:
        """Stop it; ``Server.stop``."""
        await in_thread(self._process.stop)

    async def update_copy(self, source: CopySource) -> WeightFolder:
        """Update this machine's copy in a thread; ``Server.update_copy``."""
        return await in_thread(source.update_copy)


class LocalHost:
    """Place servers on this machine. All of them see the same devices.

    Args:
        device: cpu or cuda.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def place_server(
        self, number: int, build: Callable[[str], ServerProcess], start_seconds: float, node: int = 0
    ) -> LocalServer:
        """Place server ``number``; ``EngineHost.place_server``. The process itself bounds its start."""
        return LocalServer(number, build("127.0.0.1"))

    def broadcast_device(self) -> torch.device:
        """Return the CPU: no weights are sent."""
        import torch

        return torch.device("cpu")


# Pass every call on to another engine: the base of engines that change some calls.


class EngineWrapper:
    """Implements ``miles.engine.base.Engine`` by the calls of another engine. A subclass overrides some of them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Return what the engine answers."""
        return await self._engine.generate(request)

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        """Update the engine's weights."""
        await self._engine.update_weights(chunks, version)

    async def abort(self) -> None:
        """Abort the requests in flight."""
        await self._engine.abort()

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()
