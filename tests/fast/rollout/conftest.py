"""A scripted engine and the smallest tokenizer, shared by the rollout tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from miles.engine.base import Generation, GenerationRequest
from miles.types.sample import Prompt, PromptGroup

EOS = 0


class ScriptedEngine:
    """Answers are a function of (prompt, seed); requests finish in the order of ``delays`` (event-loop turns)."""

    def __init__(self, delays: Sequence[int] = (0,), finish: Callable[[int], str] = lambda seed: "stop") -> None:
        self.requests: list[GenerationRequest] = []
        self.finished: list[tuple[int, ...]] = []
        self._delays = delays
        self._finish = finish

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        self.requests.append(request)
        for _ in range(self._delays[len(self.requests) % len(self._delays)]):
            await asyncio.sleep(0)
        self.finished.append(request.prompt_ids)
        return [self._answer(request, seed) for seed in request.seeds]

    def _answer(self, request: GenerationRequest, seed: int) -> Generation:
        length = min(1 + seed % 5, request.sampling.max_new_tokens)
        tokens = [1 + (seed >> i) % 7 for i in range(length - 1)] + [EOS]
        return Generation(tokens, [-0.5] * length, self._finish(seed), weight_version=3)  # type: ignore[arg-type]


class DigitTokenizer:
    """Token id i reads as the character i; id 0 is the end-of-sequence token."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(str(i) for i in token_ids if not (skip_special_tokens and i == EOS))


class CountingStream:
    """Prompts 0, 1, … ``size`` - 1, over and over."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.drawn = 0

    @property
    def epoch(self) -> int:
        return self.drawn // self.size

    def draw(self, n: int) -> list[PromptGroup]:
        indices = range(self.drawn, self.drawn + n)
        self.drawn += n
        return [PromptGroup(i, make_prompt(i % self.size)) for i in indices]


def make_prompt(number: int) -> Prompt:
    return Prompt(f"prompt {number}", (1,) * (1 + number), label=number, source=f"set.jsonl:{number + 1}")


@pytest.fixture(scope="session")
def scripted_engine() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture(scope="session")
def counting_stream() -> type[CountingStream]:
    return CountingStream


@pytest.fixture(scope="session")
def tokenizer() -> DigitTokenizer:
    return DigitTokenizer()
