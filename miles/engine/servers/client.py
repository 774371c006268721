"""Talk to one server over HTTP: what every engine of servers asks of its client, and how calls are sent."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import aiohttp

from miles.base.profiling import span
from miles.base.secrets import public
from miles.engine.base import Generation, GenerationRequest, SamplingParams, Server
from miles.engine.servers.keys import bearer
from miles.engine.weight_sync.deltas import CopySource
from miles.engine.weight_sync.transport import WeightReceiver
from miles.types.replay import TokenSets

# Read and write the JSON of requests and answers, by orjson if it is installed (SGLang needs it), else by ``json``.
#
# This is much of the cost of a request: an answer of 256 tokens with log-probs takes 26 µs instead of 126 to decode, a
# prompt of 256 tokens 1 µs instead of 18 to encode.


# Not there if engines run elsewhere and none of SGLang's packages is installed here.
orjson: Any = importlib.import_module("orjson") if importlib.util.find_spec("orjson") else None


def encode(content: Any) -> bytes:
    """Return ``content`` as JSON. Raises ``TypeError`` or ``ValueError`` if it is none."""
    if orjson is not None:
        with suppress(TypeError):  # a number of more than 64 bits, for instance
            encoded: bytes = orjson.dumps(content)
            return encoded
    return json.dumps(content, default=list).encode()  # other sequences than lists and tuples


def decode(content: bytes) -> Any:
    """Return the value of the JSON. Raises ``ValueError`` for other content."""
    if orjson is not None:
        with suppress(ValueError):  # NaN, which Python reads
            return orjson.loads(content)
    return json.loads(content)


T = TypeVar("T", int, float)

CONNECT_SECONDS = 60.0  # many requests sent at once connect one after the other
KEEP_ALIVE_SECONDS = 3.0  # less than SGLang's own 5: a connection that it is about to close is not used again
CONTROL_SECONDS = 600.0  # of calls that go through all weights of a large model, whose size the caller does not know
LISTENING_SECONDS = 2.0  # between two looks at whether the server of a control call still listens
SLOWEST_TRANSFER = 20e6  # bytes per second, from memory, a disk or a network; a transfer that takes longer hangs
_PROBE = GenerationRequest((0,), (0,), SamplingParams(max_new_tokens=1, temperature=0.0))


class EngineUnavailable(Exception):
    """The server gave no answer, or not a valid one. Another server may answer, or this one later."""


class RequestRefused(ValueError):
    """The server refuses the request, now and later. The message is the server's own."""


class ServerClient(ABC):
    """Call one server, or a router in front of several. An engine's client states how in its server's words.

    Every method raises ``EngineUnavailable`` or ``RequestRefused``; no other error of HTTP leaves this class.

    Connections are kept and used again. The HTTP client is aiohttp's: its cost per request does not grow with the
    requests in flight. In httpx it does, because its pool looks at every connection for every request.
    """

    generate_path: ClassVar[str]
    wrong_key: ClassVar[str]  # what to do if the server refuses the key

    def __init__(
        self, url: str, connections: int, seconds: float, key: str | None = None, admin_key: str | None = None
    ) -> None:
        """Allow ``connections`` requests at once, and some control calls in addition.

        Args:
            url: The address of the server or router.
            connections: The number of requests at once.
            seconds: The time limit of everything but responses and weight transfers (``control``, ``transfer``).
            key: The key for generation; None if the server wants none.
            admin_key: The key for control calls.
        """
        self.url = url
        self.url_text = public("url", url)  # in messages
        self._key = key
        self._admin_key = admin_key
        self._seconds = seconds
        self._connections = connections + 8
        self._http: aiohttp.ClientSession | None = None  # created by the first request: it belongs to an event loop

    async def generate(
        self,
        request: GenerationRequest,
        seed: int,
        vocab: int,
        cache_key: str | None = None,
        experts_shape: tuple[int, int] | None = None,
        seconds: float | None = None,
    ) -> Generation:
        """Generate the response of one seed. Only requests of the same ``cache_key`` share prefixes.

        ``experts_shape`` is the shape of a token's experts, layers and k, if they are asked for. The images of
        ``request`` are as ``models.images.encoded`` returns them; the server repeats the placeholder of each.
        """
        body = self._body(request, seed, vocab, cache_key)
        answer = await self._send("POST", self.generate_path, body, seconds, self._key)
        with span("check an answer"):
            return self._read(answer, request, vocab, experts_shape)

    @abstractmethod
    def _body(self, request: GenerationRequest, seed: int, vocab: int, cache_key: str | None) -> dict[str, Any]:
        """Return a request for generation in the server's words."""

    @abstractmethod
    def _read(
        self, answer: dict[str, Any], request: GenerationRequest, vocab: int, experts_shape: tuple[int, int] | None
    ) -> Generation:
        """Read and check the answer to ``request``."""

    async def probe(self, version: int | None, vocab: int) -> None:
        """Generate one token, and check that the weights ``version`` generated it (None: any weights)."""
        generation = await self.generate(_PROBE, 0, vocab, seconds=self._seconds)
        self._check_version(generation.weight_version, version)

    def _check_version(self, actual: int, version: int | None) -> None:
        """Raise ``EngineUnavailable`` if the server has other weights than ``version`` (None: any weights)."""
        if version is not None and actual != version:
            raise EngineUnavailable(f"{self.url_text} has weights {actual} instead of {version}")

    @abstractmethod
    async def check_health(self, version: int | None) -> None:
        """Check that the server makes progress, and the version of its weights (None: any version)."""

    @abstractmethod
    async def pause(self, mode: str) -> None:
        """Stop at the next token. ``mode`` is the value of ``--pause-generation-mode``."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue after ``pause``."""

    @abstractmethod
    async def abort_all(self) -> None:
        """End every request that the server has."""

    @abstractmethod
    async def release_memory(self) -> None:
        """Release the GPU memory of weights and cache."""

    @abstractmethod
    async def take_memory(self, for_weights: bool) -> None:
        """Take released memory back: first the memory of the weights, then the rest."""

    async def control(self, path: str, body: dict[str, Any], seconds: float = CONTROL_SECONDS) -> dict[str, Any]:
        """Make a control call. Raises ``RequestRefused`` if it failed."""
        sent = self._send("POST", path, body, seconds, self._admin_key)
        answer = await self._while_listening(path, sent)
        if answer.get("success", True) is not True or "error" in answer:
            raise RequestRefused(f"{self.url_text}{path}: {answer.get('message', answer)}")
        return answer

    async def _while_listening(self, path: str, answer: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Await the answer to a control call. It fails when the server no longer listens.

        vLLM never answers a call that waits for an engine whose process has ended: it stops listening, and then waits
        for its connections to close.
        """
        call = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait([call], timeout=LISTENING_SECONDS))[0]:
                if await refuses_connections(self.url, self._seconds) and not call.done():
                    raise EngineUnavailable(f"{self.url_text}{path}: no answer, and the server no longer listens")
            return call.result()
        finally:
            call.cancel()

    @contextmanager
    def _reading_log_probs(self, answer: object) -> Iterator[None]:
        """Raise ``EngineUnavailable`` if the body cannot read the log-probs in ``answer``."""
        try:
            yield
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise EngineUnavailable(
                f"{self.url_text}: an answer without log-probs ({error!r}): {str(answer)[:300]}"
            ) from error

    async def transfer(self, path: str, body: dict[str, Any], nbytes: int) -> None:
        """Make a control call during which the server goes through ``nbytes`` bytes of weights."""
        await self.control(path, body, self._seconds + nbytes / SLOWEST_TRANSFER)

    async def _send(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float | None, key: str | None
    ) -> dict[str, Any]:
        """Return the JSON object that answers ``body``; an empty one for an empty answer."""
        # Nobody knows beforehand how long a response takes to generate, so ``seconds`` None sets no limit on reading.
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        headers = bearer(key)
        sent = None
        if body is not None:
            headers = {**headers, "Content-Type": "application/json"}
            sent = encode(body)
        try:
            request = self._session().request(method, self.url + path, data=sent, timeout=timeout, headers=headers)
            async with request as response:
                status, content = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnavailable(
                f"{self.url_text}{path}: {type(error).__name__} {public('', str(error))}".rstrip()
            ) from error
        if status >= 500 or status in (408, 429):
            raise EngineUnavailable(f"{self.url_text}{path}: HTTP {status} {_text(content, 300)}")
        if status in (401, 403):
            raise RequestRefused(f"{self.url_text}{path}: HTTP {status}: {self.wrong_key}")
        if status >= 400:
            raise RequestRefused(f"{self.url_text}{path}: HTTP {status} {_text(content, 1000)}")
        if content in (b"", b"null"):  # some control calls answer nothing
            return {}
        try:
            with span("decode an answer"):
                answer = decode(content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EngineUnavailable(f"{self.url_text}{path}: the answer is not a JSON object: {_text(content, 300)!r}")
        return answer

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=KEEP_ALIVE_SECONDS)
            self._http = aiohttp.ClientSession(connector=connector)  # reads no proxy from the environment
        return self._http

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()


async def refuses_connections(url: str, seconds: float) -> bool:
    """Return whether nothing listens at ``url``: the connections of the process that did have ended, or will."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(seconds):
            _, connection = await asyncio.open_connection(parts.hostname, parts.port or parts.scheme)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    connection.close()
    return False


class ServerReceiver(WeightReceiver):
    """Receive weights as one server: what every engine's receiver does alike.

    Every call checks the server's reply. An update that fails halfway leaves weights that nobody should use.
    """

    def __init__(self, client: ServerClient, num_ranks: int, flush: bool, process: Server) -> None:
        """With ``flush``, an update drops what the old weights have computed; else requests need another cache key."""
        self.url = client.url
        self.num_ranks = num_ranks
        self._client = client
        self._flush = flush
        self._process = process
        self._received = 0  # bytes of this update

    async def load_copy(self, source: CopySource, version: int) -> None:
        """Read all weights from the copy of the server's host; see ``WeightReceiver``."""
        await self.load_folder(await self._process.update_copy(source), version)


def _text(content: bytes, length: int) -> str:
    return content.decode(errors="replace")[:length]


def as_numbers(kind: type[T], values: Iterable[Any]) -> list[T]:
    """Return the values as numbers of ``kind``, which a JSON answer mostly has already: to convert each costs more."""
    numbers = list(values)
    return numbers if set(map(type, numbers)) <= {kind} else list(map(kind, numbers))


def checked_generation(generation: Generation, vocab: int, answer: object) -> Generation:
    """Return ``generation`` if its tokens are of the vocabulary, its log-probs are some, and its versions fit.

    Raises:
        EngineUnavailable: It is none; ``answer`` is the server's answer.
    """
    token_ids, log_probs = generation.token_ids, generation.log_probs
    sound = (
        generation.finish_reason in ("stop", "length", "abort")
        and len(token_ids) == len(log_probs)
        and min(token_ids, default=0) >= 0
        and max(token_ids, default=0) < vocab
        and math.isfinite(sum(log_probs))  # then each of them is; in C, since there are many
        and max(log_probs, default=0.0) <= 1e-4
        and sum(tokens for _, tokens in generation.earlier_versions) <= len(token_ids)
    )
    if not sound:
        raise EngineUnavailable(f"an answer whose tokens and log-probs are no generation: {str(answer)[:300]}")
    return generation


def check_prompt_tokens(counts: Mapping[str, Any], request: GenerationRequest) -> None:
    """Raise ``RequestRefused`` unless a server has made as many tokens of a prompt with images as were rendered."""
    rendered, read = len(request.prompt_ids), counts.get("prompt_tokens")
    if request.images is not None and read != rendered:
        raise RequestRefused(
            f"{request.images.where}: the server reads the prompt with its images as {read} tokens, and it was "
            f"rendered with {rendered}; give both the same transformers, and the server no settings for images of its "
            "own"
        )


def checked_support(
    sets: Sequence[Sequence[int]], log_probs: Sequence[float], token_ids: Sequence[int], vocab: int, answer: object
) -> tuple[list[float], TokenSets]:
    """Return the log-probs of the tokens over the sets that they were drawn from, and these sets.

    Raises:
        EngineUnavailable: They do not fit the tokens; ``answer`` is the server's answer.
    """
    try:
        support = TokenSets.of(vocab, [[int(token) for token in token_set] for token_set in sets])
        support.check()
        sound = len(sets) == len(log_probs) == len(token_ids) and bool(support.contain(token_ids).all())
        values = [float(value) for value in log_probs]
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise EngineUnavailable(f"an answer whose kept tokens cannot be read ({error})") from error
    if not (sound and all(math.isfinite(value) and value <= 1e-4 for value in values)):
        raise EngineUnavailable(f"an answer whose kept tokens do not fit its tokens: {str(answer)[:300]}")
    return values, support


def read_version(value: Any) -> int:
    """Return the version of the weights; -1 for weights that no update of miles has sent."""
    text = str(value)
    return int(text) if text.isdecimal() else -1
