"""A trajectory in the making: turns of the model, and between them tokens of a tool or an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

from miles.engine.base import Engine, FinishReason, GenerationRequest, SamplingParams
from miles.rollout.generate import STATUS, Detokenizer
from miles.sample import NO_WEIGHTS, Sample, SampleStatus


class Tokenizer(Detokenizer, Protocol):
    """The part of a transformers tokenizer that multi-turn generation needs."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def get_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class Turn:
    """What the model wrote in one turn. ``text`` is without special tokens; ``finish_reason`` as an engine gives it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason


@dataclass
class Trajectory:
    """What ``--custom-generate-function-path`` works on: one response, longer by each turn.

    The model's tokens have loss mask 1 and the engine's log-probs; those of ``append`` have mask 0 and log-prob 0: they
    are read and never trained on. ``--rollout-max-response-len`` and ``--rollout-max-context-len`` bound the whole
    response, the environment's tokens included.
    """

    sample: Sample  # ``sample.prompt`` says what is asked; its columns grow with the turns
    tokenizer: Any  # a transformers tokenizer (``Tokenizer``)
    engine: Engine
    sampling: SamplingParams
    seed_of_turn: Callable[[int], int]
    max_context_len: int | None = None
    turns: int = 0

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        left = self.sampling.max_new_tokens - len(self.sample.response_ids)
        if self.max_context_len is not None:
            left = min(left, self.max_context_len - len(self.sample.tokens))
        return max(left, 0)

    @property
    def finished(self) -> bool:
        """True once there is no room left, or the response was aborted from outside."""
        return self.room == 0 or self.sample.status is SampleStatus.ABORTED

    async def generate(self, *, stop_token_ids: Sequence[int] = (), max_new_tokens: int | None = None) -> Turn:
        """Let the model go on until its end-of-sequence token, one of ``stop_token_ids``, or the limits.

        Where no room is left, nothing is generated and the turn is empty, with finish_reason ``length``. Raises what
        the engine raises.
        """
        if self.finished:
            return Turn("", [], "abort" if self.sample.status is SampleStatus.ABORTED else "length")
        sampling = replace(
            self.sampling,
            max_new_tokens=min(self.room, max_new_tokens or self.room),
            stop_token_ids=(*self.sampling.stop_token_ids, *stop_token_ids),
        )
        seeds = (self.seed_of_turn(self.turns),)
        [generation] = await self.engine.generate(GenerationRequest(tuple(self.sample.tokens), seeds, sampling))
        self.turns += 1
        self._extend(generation.token_ids, 1, generation.log_probs, generation.token_versions)
        self.sample.status = STATUS[generation.finish_reason]
        text = self.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
        return Turn(text, generation.token_ids, generation.finish_reason)

    def append(self, text: str) -> None:
        """Add what a tool or an environment says, without a special token of the tokenizer's own.

        Text that does not fit is cut at the limit, and the sample is ``TRUNCATED``.
        """
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(token_ids) >= self.room:
            self.sample.status = SampleStatus.TRUNCATED
        token_ids = token_ids[: self.room]
        self._extend(token_ids, 0, [0.0] * len(token_ids), [NO_WEIGHTS] * len(token_ids))

    def _extend(self, token_ids: list[int], mask: int, log_probs: list[float], versions: list[int]) -> None:
        sample = self.sample
        sample.response_ids += token_ids
        sample.loss_mask += [mask] * len(token_ids)
        sample.rollout_log_probs += log_probs
        sample.weight_versions += versions
        sample.response = self.tokenizer.decode(sample.response_ids, skip_special_tokens=True)


@lru_cache(maxsize=8)  # a vocabulary is read once, not once a turn
def token_ids_with(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The ids of all tokens that hold ``text``, a character say: ``stop_token_ids`` that stop at it.

    Such a stop takes along what its token holds after the text: ``)`` stops at a token ``).`` too.
    """
    ids = sorted(tokenizer.get_vocab().values())
    return tuple(index for index in ids if text in tokenizer.decode([index], skip_special_tokens=True))
