"""Talk to one SGLang server over HTTP: its calls, and what counts as a valid answer."""

from __future__ import annotations

import base64
import importlib.util
import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import aiohttp
import numpy as np

from miles.base.profiling import span
from miles.base.secrets import public
from miles.config.components import stop_pattern
from miles.engine.base import Generation, SamplingParams
from miles.engine.sglang.keys import bearer
from miles.types.replay import TokenSets, dtype_for

# Read and write the JSON of requests and answers, by orjson if it is installed (SGLang needs it), else by ``json``.
#
# This is much of what a request costs: an answer of 256 tokens with log-probs takes 26 µs instead of 126 to decode, a
# prompt of 256 tokens 1 µs instead of 18 to encode.


# Not there if engines run elsewhere and none of SGLang's packages is installed here.
orjson: Any = importlib.import_module("orjson") if importlib.util.find_spec("orjson") else None


def encode(content: Any) -> bytes:
    """Return ``content`` as JSON. Raises ``TypeError`` or ``ValueError`` if it is none."""
    if orjson is not None:
        with suppress(TypeError):  # a number of more than 64 bits, for instance
            encoded: bytes = orjson.dumps(content)
            return encoded
    return json.dumps(content, default=_as_list).encode()


def _as_list(content: Any) -> Any:
    return list(content)  # other sequences than lists and tuples


def decode(content: bytes) -> Any:
    """Return what the JSON says. Raises ``ValueError`` if it is none."""
    if orjson is not None:
        with suppress(ValueError):  # NaN, which Python reads
            return orjson.loads(content)
    return json.loads(content)


T = TypeVar("T", int, float)

CONNECT_SECONDS = 60.0  # many requests sent at once connect one after the other
KEEP_ALIVE_SECONDS = 3.0  # less than SGLang's own 5: a connection that it is about to close is not used again
WRONG_KEY = (
    "the server wants another key; give the one that it was started with, as --sglang-api-key and "
    "--sglang-admin-api-key"
)
CONTROL_SECONDS = 600.0  # of calls that go through all weights of a large model, whose size the caller does not know
SLOWEST_TRANSFER = 20e6  # bytes per second, from memory, a disk or a network; a transfer that takes longer hangs


class EngineUnavailable(Exception):
    """The server gave no answer, or not a valid one. Another server may answer, or this one later."""


class RequestRefused(ValueError):
    """The server refuses the request, now and later. The message is the server's own."""


class SglangClient:
    """Call one server, or a router in front of several.

    Every method raises ``EngineUnavailable`` or ``RequestRefused``; no other error of HTTP leaves this class.

    Connections are kept and used again. The HTTP client is aiohttp's: its cost per request does not grow with the
    requests in flight. In httpx it does, because its pool looks at every connection for every request.
    """

    def __init__(
        self, url: str, connections: int, seconds: float, key: str | None = None, admin_key: str | None = None
    ) -> None:
        """Allow ``connections`` requests at a time, and some control calls in addition.

        Args:
            url: The address of the server or router.
            connections: The number of requests at a time.
            seconds: The time limit of everything but responses and weight transfers (``control``, ``transfer``).
            key: The key for generation; None if the server wants none.
            admin_key: The key for control calls.
        """
        self.url = url
        self.shown = public("url", url)  # in messages
        self._key = key
        self._admin_key = admin_key
        self._seconds = seconds
        self._connections = connections + 8
        self._http: aiohttp.ClientSession | None = None  # created by the first request: it belongs to an event loop

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        seed: int,
        vocab: int,
        cache_key: str | None = None,
        experts_shape: tuple[int, int] | None = None,
    ) -> Generation:
        """Generate one response. Only requests of the same ``cache_key`` share prefixes.

        ``experts_shape`` is that of a token's experts, layers and k, if they are asked for.

        SGLang honours the seed only under deterministic inference on GPUs.
        """
        body = {
            "input_ids": prompt_ids,
            "sampling_params": sampling_params(sampling, seed),
            "return_logprob": True,
            **({} if cache_key is None else {"extra_key": cache_key}),
            **({"return_sampling_mask": True} if sampling.returns_support else {}),
        }
        if sampling.returns_experts:
            body["return_routed_experts"] = True
        answer = await self._post("/generate", body, seconds=None)
        with span("check an answer"):
            found = read_generation(answer, vocab, sampling.returns_support)
        if not sampling.returns_experts or not found.token_ids:
            return found
        assert experts_shape is not None, "the engine knows the model's experts"
        positions = len(prompt_ids) + len(found.token_ids) - 1
        return replace(found, experts=read_experts(answer["meta_info"], (positions, *experts_shape)))

    async def input_log_probs(self, token_ids: Sequence[int], first: int) -> dict[str, Any]:
        """Return an answer with the log-probs of the tokens from position ``first`` on, at temperature 1."""
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": max(0, first - 1),  # SGLang gives none of the first token of these
        }
        return await self._post("/generate", body, self._seconds)

    async def probe(self, version: int | None, vocab: int) -> None:
        """Generate one token, and check that the weights ``version`` generated it (None: any weights)."""
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
        }
        answer = read_generation(await self._post("/generate", body, self._seconds), vocab)
        if version is not None and answer.weight_version != version:
            raise EngineUnavailable(f"{self.shown} has weights {answer.weight_version} instead of {version}")

    async def check_health(self, version: int | None) -> None:
        """Ask for the server's own test, then check the version of its weights (None: any version).

        A busy server passes its own test as long as it makes progress.
        """
        await self._send("GET", "/health_generate", None, self._seconds, self._key)
        info = await self._send("GET", "/model_info", None, self._seconds, self._key)
        found = read_version(info.get("weight_version"))
        if version is not None and found != version:
            raise EngineUnavailable(f"{self.shown} has weights {found} instead of {version}")

    async def control(self, path: str, body: dict[str, Any], seconds: float = CONTROL_SECONDS) -> dict[str, Any]:
        """Make a control call such as ``/pause_generation``. Raises ``RequestRefused`` if it failed."""
        answer = await self._send("POST", path, body, seconds, self._admin_key)
        if answer.get("success", True) is not True:
            raise RequestRefused(f"{self.shown}{path}: {answer.get('message')}")
        return answer

    async def transfer(self, path: str, body: dict[str, Any], nbytes: int) -> None:
        """Make a control call during which the server goes through ``nbytes`` bytes of weights."""
        await self.control(path, body, self._seconds + nbytes / SLOWEST_TRANSFER)

    async def pause(self, mode: str) -> None:
        """Stop at the next token. ``mode`` is that of ``--pause-generation-mode``."""
        await self.control("/pause_generation", {"mode": mode}, self._seconds)

    async def resume(self) -> None:
        """Continue after ``pause``."""
        await self.control("/continue_generation", {}, self._seconds)

    async def abort_all(self) -> None:
        """End every request that the server has."""
        await self.control("/abort_request", {"abort_all": True}, self._seconds)

    async def begin_update(self) -> None:
        """Open an update of the weights. Raises ``RequestRefused`` if one is open.

        It moves no weights, so it may take no longer than a health check.
        """
        await self.control("/begin_weight_update", {}, self._seconds)

    async def release_memory(self) -> None:
        """Release the GPU memory of weights and cache."""
        await self.control("/release_memory_occupation", {}, self._seconds)

    async def take_memory(self, tags: Sequence[str]) -> None:
        """Take the tagged parts of released memory back: ``weights``, ``kv_cache``, ``cuda_graph``."""
        await self.control("/resume_memory_occupation", {"tags": list(tags)}, self._seconds)

    async def _post(self, path: str, body: dict[str, Any], seconds: float | None) -> dict[str, Any]:
        return await self._send("POST", path, body, seconds, self._key)

    async def _send(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float | None, key: str | None
    ) -> dict[str, Any]:
        """Return the JSON object that answers ``body``; an empty one for an empty answer."""
        # Nobody knows beforehand how long a response takes to generate, so ``seconds`` None sets no limit on reading.
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        sent, headers = None, bearer(key)
        if body is not None:
            sent, headers = encode(body), {**(headers or {}), "Content-Type": "application/json"}
        try:
            request = self._session().request(method, self.url + path, data=sent, timeout=timeout, headers=headers)
            async with request as response:
                status, content = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineUnavailable(
                f"{self.shown}{path}: {type(error).__name__} {public('', str(error))}".rstrip()
            ) from error
        if status >= 500 or status in (408, 429):
            raise EngineUnavailable(f"{self.shown}{path}: HTTP {status} {_text(content, 300)}")
        if status in (401, 403):
            raise RequestRefused(f"{self.shown}{path}: HTTP {status}: {WRONG_KEY}")
        if status >= 400:
            raise RequestRefused(f"{self.shown}{path}: HTTP {status} {_text(content, 1000)}")
        if content in (b"", b"null"):  # some control calls answer nothing
            return {}
        try:
            with span("decode an answer"):
                answer = decode(content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EngineUnavailable(f"{self.shown}{path}: the answer is not a JSON object: {_text(content, 300)!r}")
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


def _text(content: bytes, length: int) -> str:
    return content.decode(errors="replace")[:length]


def sampling_params(sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """Return ``sampling`` under SGLang's names. A stop token ends a response and stays in it.

    SGLang looks for a text of its ``stop`` in as many last tokens as its tokenizer makes of the text, and one more. A
    model may write it with more tokens. ``stop_pattern`` has it look at enough.
    """
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        **({"stop_regex": [stop_pattern(text) for text in sampling.stop_texts]} if sampling.stop_texts else {}),
        "sampling_seed": seed & 0x7FFFFFFF,  # SGLang's kernels hash 32-bit seeds
    }


def read_generation(answer: dict[str, Any], vocab: int, with_support: bool = False) -> Generation:
    """Read the response in SGLang's answer, with the support of each token if that was asked for.

    Raises:
        EngineUnavailable: If a field is missing or malformed.
        RequestRefused: If the server knows no supports.
    """
    try:
        meta = answer["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        token_ids = _as(int, answer["output_ids"])
        values, tokens, *_ = zip(*entries, strict=False) if entries else ((), ())
        log_probs, chosen = _as(float, values), _as(int, tokens)
        reason = meta["finish_reason"]["type"]
        last, earlier = read_versions(meta)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise EngineUnavailable(f"an answer that is no generation ({error!r}): {str(answer)[:300]}") from error
    sound = (
        reason in ("stop", "length", "abort")
        and len(token_ids) == len(log_probs)
        and min(token_ids, default=0) >= 0
        and max(token_ids, default=0) < vocab
        and math.isfinite(sum(log_probs))  # then each of them is; in C, since there are many
        and max(log_probs, default=0.0) <= 1e-4
        and chosen == token_ids
        and sum(tokens for _, tokens in earlier) <= len(token_ids)
    )
    if not sound:
        raise EngineUnavailable(f"an answer whose tokens and log-probs are no generation: {str(answer)[:300]}")
    if not with_support:
        return Generation(token_ids, log_probs, reason, last, earlier)
    log_probs, support = read_support(meta, token_ids, vocab)
    return Generation(token_ids, log_probs, reason, last, earlier, support)


def _as(kind: type[T], values: Iterable[Any]) -> list[T]:
    """Return the values as numbers of ``kind``, which a JSON answer mostly has already: to convert each costs more."""
    found = list(values)
    return found if set(map(type, found)) <= {kind} else list(map(kind, found))


def read_support(meta: dict[str, Any], token_ids: Sequence[int], vocab: int) -> tuple[list[float], TokenSets]:
    """Return the log-probs of the tokens over the sets that they were drawn from, and these sets.

    Raises what ``read_generation`` does.
    """
    sets = meta.get("output_token_sampling_mask", [] if not token_ids else None)
    log_probs = meta.get("output_token_sampling_logprobs", [])
    if sets is None:
        raise RequestRefused(
            "the server returns no tokens that top-p, top-k and min-p have kept; SGLang 0.5.23 and later do, and a "
            "router must pass the field return_sampling_mask on: use those, or add --no-support-replay"
        )
    try:
        made = TokenSets.of(vocab, [[int(token) for token in kept] for kept in sets])
        made.check()
        sound = len(sets) == len(log_probs) == len(token_ids) and bool(made.contain(token_ids).all())
        found = [float(value) for value in log_probs]
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise EngineUnavailable(f"an answer whose kept tokens cannot be read ({error})") from error
    if not (sound and all(math.isfinite(value) and value <= 1e-4 for value in found)):
        raise EngineUnavailable(f"an answer whose kept tokens do not fit its tokens: {str(meta)[:300]}")
    return found, made


def read_experts(meta: dict[str, Any], shape: tuple[int, int, int]) -> np.ndarray:
    """Return the experts of all tokens but the last, of ``shape``: positions, layers, k.

    SGLang gives them as int32 in base64 (0.5.23, ``srt/managers/tokenizer_manager.py``, ``routed_experts``).

    Raises:
        EngineUnavailable: They are of another shape.
        RequestRefused: If the server gives none.
    """
    given = meta.get("routed_experts")
    if given is None:
        raise RequestRefused(
            "--use-rollout-routing-replay: the server does not return the experts that it chose; start it with "
            "--enable-return-routed-experts"
        )
    try:
        numbers = np.frombuffer(base64.b64decode(given, validate=True), np.int32)
    except (TypeError, ValueError) as error:
        raise EngineUnavailable(f"an answer whose experts cannot be read ({error})") from error
    if len(numbers) != math.prod(shape) or (len(numbers) and not 0 <= numbers.min() <= numbers.max() < 2**15):
        raise EngineUnavailable(f"an answer with {len(numbers)} experts, for a shape of {shape}")
    return numbers.reshape(shape).astype(dtype_for(int(numbers.max(initial=0)) + 1))


def read_versions(meta: dict[str, Any]) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the version of the last token, and (version, tokens) of each run of tokens of an earlier version.

    If the weights changed during the response, SGLang lists the runs as spans of token positions, in order.
    """
    last = read_version(meta["weight_version"])
    runs = [(read_version(s["version"]), int(s["end"]) - int(s["start"])) for s in meta.get("weight_versions") or ()]
    return last, tuple(run for run in runs[:-1] if run[1] > 0)


def read_version(value: Any) -> int:
    """Return the version of the weights; -1 for weights that no update of ours has sent."""
    text = str(value)
    return int(text) if text.isdecimal() else -1
