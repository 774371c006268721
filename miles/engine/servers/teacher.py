"""Ask servers of SGLang or vLLM for a teacher's log-probs of sampled tokens (``--opd-type server``)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

from miles.base.threads import gather_or_cancel
from miles.config.settings import Settings
from miles.engine.servers.client import EngineUnavailable
from miles.engine.sglang.client import SglangClient
from miles.engine.vllm.client import VllmClient
from miles.types.sample import Sample

IN_FLIGHT = 64  # requests of a run at once to one server: scoring a long sequence needs much memory there
SECONDS = 600.0  # of one request
OF_VLLM = "/v1"  # ends the address of a vLLM server, as clients of OpenAI's interface write it
WAITS = (1.0, 4.0, 15.0, 60.0)  # seconds before a request is sent again


class TeacherServers:
    """One server for each teacher, chosen by the prompt's metadata; ``miles.engine.base.ServedTeacher``."""

    def __init__(
        self, urls: Mapping[str, str], key: str, waits: Sequence[float] = WAITS, in_flight: int = IN_FLIGHT
    ) -> None:
        """Reach the servers at ``urls``, by the names of the teachers, with ``in_flight`` requests at once each.

        ``key`` is the key of the metadata.
        """
        self._key = key
        self._waits = waits
        self._clients = {name: _client(url, in_flight) for name, url in urls.items()}
        self._slots = {name: asyncio.Semaphore(in_flight) for name in urls}

    async def score(self, samples: Sequence[Sample]) -> None:
        """Give every sample the ``teacher_log_probs`` of its response.

        Raises:
            ValueError: A prompt names no teacher, or a server refuses the request or has another vocabulary.
            EngineUnavailable: A server gives no sound answer, several times.
        """
        await gather_or_cancel(self._score(sample) for sample in samples)

    async def _score(self, sample: Sample) -> None:
        name = self._teacher_of(sample)
        if not sample.response_ids:
            return
        async with self._slots[name]:
            sample.teacher_log_probs = await self._asked(self._clients[name], sample)

    async def _asked(self, client: SglangClient | VllmClient, sample: Sample) -> list[float]:
        for wait in (*self._waits, None):
            try:
                pairs = await client.input_log_probs(sample.tokens, first=len(sample.prompt.token_ids))
                return _checked(pairs, sample.response_ids, client.url_text)
            except EngineUnavailable:
                if wait is None:
                    raise
                await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _teacher_of(self, sample: Sample) -> str:
        if len(self._clients) == 1:
            return next(iter(self._clients))
        name = sample.metadata.get(self._key)
        if not isinstance(name, str) or name not in self._clients:
            raise ValueError(
                f"--opd-teacher-urls: the metadata of prompt {sample.prompt.source or sample.group_index} has "
                f"{self._key} {name!r:.40}, which is none of {', '.join(self._clients)}; correct the row, or "
                "--opd-teacher-key"
            )
        return name

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            await client.close()


def connect(settings: Settings, share: Callable[[int], int]) -> TeacherServers:
    """Return the servers of a run; ``miles.engine.base.connect_teacher``."""
    loss = settings.loss
    return TeacherServers(loss.teachers, loss.opd_teacher_key, in_flight=share(IN_FLIGHT))


def _client(url: str, in_flight: int) -> SglangClient | VllmClient:
    if url.endswith(OF_VLLM):
        return VllmClient(url.removesuffix(OF_VLLM), in_flight, SECONDS)
    return SglangClient(url, in_flight, SECONDS)


def _checked(pairs: Sequence[tuple[int, float]], response_ids: Sequence[int], url: str) -> list[float]:
    """Return the log-probs of ``pairs`` if its tokens are ``response_ids``.

    Raises:
        EngineUnavailable: They are no log-probs.
        ValueError: They belong to other tokens.
    """
    log_probs = [value for _, value in pairs]
    if [token for token, _ in pairs] != list(response_ids):
        raise ValueError(
            f"--opd-teacher-urls {url}: the server gives log-probs of other tokens than those it was sent; the teacher "
            "must have the tokenizer of --hf-checkpoint"
        )
    if not all(math.isfinite(value) and value <= 1e-4 for value in log_probs):
        raise EngineUnavailable(f"{url}: an answer with values that are no log-probs: {str(log_probs)[:300]}")
    return log_probs
