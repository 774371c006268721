"""The protocol of a generation engine. The rollout side knows engines by this protocol only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from miles.config.components import build, build_teacher, engine_spec
from miles.types.weights import WeightChunk

if TYPE_CHECKING:
    import numpy as np

    from miles.config.settings import Settings
    from miles.engine.host import EngineHost
    from miles.objective.settings import LossArguments
    from miles.types.sample import Sample
    from miles.types.token_sets import TokenSets

FinishReason = Literal["stop", "length", "abort"]


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
            before those of ``weight_version``, oldest first.
        support: The set that each token was drawn from, if ``returns_support`` asked for it.
        experts: The experts of each layer for the tokens of prompt and response but the last, [positions, layers, k],
            if ``returns_experts`` asked for them (``miles/types/expert_choices.py``).

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
        ...

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        """Replace the weights. Raises ``ValueError`` naming the parameters that are missing or unknown.

        An engine of several servers may iterate ``chunks`` again, until the next update, for a server that restarts.
        """
        ...

    async def pause(self) -> None:
        """Stop at the next token. Requests in flight keep their tokens."""
        ...

    async def resume(self) -> None:
        """Continue the paused requests."""
        ...

    async def abort(self) -> None:
        """End every request in flight now. Each returns what it has, with finish_reason ``abort``."""
        ...

    async def health(self) -> bool:
        """Return whether the engine can serve requests."""
        ...

    async def close(self) -> None:
        """Release everything that the engine holds. No call may follow."""
        ...


@runtime_checkable
class ReleasesMemory(Protocol):
    """An optional capability of an engine: give its GPU memory to the trainer between two weight updates."""

    async def release_memory(self) -> None:
        """Release the memory of weights and cache until the next ``update_weights``.

        Raises ``RuntimeError`` if requests are in flight.
        """
        ...


class RemoteSenders(Protocol):
    """Other processes that send requests to the servers of an engine, all of them together."""

    async def show(self, state: Any) -> None:
        """Give every process the state of the servers; return when each has it. Calls take effect in order."""
        ...

    async def aborted(self) -> None:
        """Have every process send nothing of what was asked for before; return when all it had sent has ended."""
        ...

    async def in_flight(self) -> int:
        """Return how many requests have been sent and not answered."""
        ...


class RequestSender(Protocol):
    """Sends requests to the servers of an engine that another process has; as an engine, it only generates."""

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Return one ``Generation`` per seed, as ``Engine.generate`` does."""
        ...

    def show(self, state: Any) -> None:
        """Take in what the engine says about the servers. Requests wait for the first time."""
        ...

    async def aborted(self) -> None:
        """Send nothing of what was asked for before; return when all that was sent has ended."""
        ...

    @property
    def in_flight(self) -> int:
        """How many requests have been sent and not answered."""
        ...

    async def close(self) -> None:
        """Close the connections. No call may follow."""
        ...


class SenderConfig(Protocol):
    """What another process needs to send requests. It is pickled."""

    requests: int  # at a time, of all processes together

    def open(self, requests: int, check_servers: Callable[[], Awaitable[None]]) -> RequestSender:
        """Return what sends up to ``requests`` at a time; it calls ``check_servers`` after a failed try."""
        ...


@runtime_checkable
class SharesServers(Protocol):
    """An optional capability of an engine: other processes send requests to its servers too."""

    def sender_config(self) -> SenderConfig:
        """Return what such a process needs."""
        ...

    async def share(self, senders: RemoteSenders) -> None:
        """Show ``senders`` the servers from now on, and abort their requests with the engine's own."""
        ...

    async def check_servers(self) -> None:
        """After a failed request: find the servers that do not work, and wait for an update in progress."""
        ...


@runtime_checkable
class HasQueues(Protocol):
    """An optional capability of an engine: say how many requests wait and run, for the report of a hang."""

    def queue_lengths(self) -> dict[str, int]:
        """Return a number for each queue. May be called from another thread."""
        ...


class ServedTeacher(Protocol):
    """Servers that score samples for distillation (``--opd-type server``)."""

    async def score(self, samples: Sequence[Sample]) -> None:
        """Give every sample the ``teacher_log_probs`` of its response.

        Raises:
            ValueError: A prompt names no teacher, or a server refuses the request or has another vocabulary.
        """
        ...

    async def close(self) -> None:
        """Close the connections. No call may follow."""
        ...


def connect_teacher(loss: LossArguments, share: Callable[[int], int] = lambda total: total) -> ServedTeacher | None:
    """Return the servers that score samples; None if the run has none.

    Args:
        loss: Names the servers.
        share: Returns how many of the requests that a run may have in flight are this process's.
    """
    if not loss.teacher_is_served:
        return None
    teacher: ServedTeacher = build_teacher("server", loss, share)
    return teacher


async def start_engine(settings: Settings, host: EngineHost) -> Engine:
    """Build and start the engine that ``--rollout-engine`` names.

    Raises:
        ValueError: If no engine has this name, and for what the engine refuses.
    """
    engine: Engine = await build(engine_spec(settings.rollout.rollout_engine), settings, host)
    return engine
