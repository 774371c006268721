"""The calls of one trajectory, recorded token by token.

A call whose messages begin with the messages of an earlier answer, and the answer itself, continues after the tokens
that were sampled for it; only the new messages are tokenized. A call continues the sample of that answer if no other
call has done so. Any other call begins a new sample of the trajectory: an independent question, a branch, or a
compacted conversation. A branch begins with the sampled tokens of the answers that it shares, which are a part of its
prompt there, so every sampled token is trained on once::

    call 1   user                            sample A   prompt [user]  response [answer 1
    call 2   user, answer 1, tool                                                tool, answer 2
    call 3   user, answer 1, other           sample B   prompt [user, answer 1, other]  response [answer 3]
    call 4   summary                         sample C   prompt [summary]  response [answer 4]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from miles.base.text import one_line
from miles.base.threads import cancel_all
from miles.config.components import StopTextLimits
from miles.engine.base import Generation, GenerationRequest
from miles.rollout.agents.chat import (
    OUT_OF_ROOM,
    ApiError,
    ChatFormat,
    ChatRequest,
    ToolCall,
    message_key,
    parse_tool_calls,
    read_messages,
)
from miles.rollout.groups import STATUS
from miles.rollout.trajectory import Trajectory, extend
from miles.types.sample import Sample, SampleStatus

if TYPE_CHECKING:
    from miles.types.images import PromptImages


@dataclass(frozen=True)
class Answer:
    """The answer to a call.

    Attributes:
        number: The calls of the session before it.
        content: The text without tool calls.
        tool_calls: The calls that the model makes.
        finish_reason: As OpenAI's API has it: ``stop``, ``length`` or ``tool_calls``.
        prompt_tokens: The tokens that the model has read.
        sampled_tokens: The tokens that it has written.
    """

    number: int
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int

    @property
    def message(self) -> dict[str, Any]:
        """The message, as OpenAI's API has it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {
                    "id": f"call_{self.number}_{place}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for place, call in enumerate(self.tool_calls)
            ]
        return message


@dataclass(eq=False)
class _Turn:
    """An answer in a sample. ``end`` counts the response tokens up to its last one; ``images`` are those before it."""

    sample: Sample
    end: int
    images: PromptImages | None
    continued: bool = False  # by a call that extends the sample

    @property
    def token_ids(self) -> list[int]:
        return [*self.sample.prompt.token_ids, *self.sample.response_ids[: self.end]]


@dataclass(frozen=True)
class _Place:
    """The position of a call's answer: after ``turn`` in its sample, or into a new sample of ``prompt_ids``."""

    turn: _Turn | None
    prompt_ids: list[int]  # all that the model reads
    read: list[int]  # the end of ``prompt_ids``: what comes after ``turn``; empty in a new sample
    room: int
    images: PromptImages | None  # in ``prompt_ids``


class Session:
    """The calls of one trajectory, until it is closed. All methods belong to one event loop.

    Attributes:
        idle: Set while the program works on its own.
        busy: Set otherwise: while a call is being answered, or another ``not_its_own`` block runs.
        ended: Set when no further call can be answered, because the engine failed or was aborted.
        error: The exception that the engine raised.
        refused_for_room: Whether a call was refused because the conversation has become too long.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        chat: ChatFormat,
        *,
        takes_stop_texts: bool,
        stop_text_limits: StopTextLimits | None = None,
    ) -> None:
        assert trajectory.max_context_len is not None, "validate() requires --rollout-max-context-len"
        self.idle, self.busy, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None
        self.refused_for_room = False
        self._trajectory = trajectory
        self._chat = chat
        self._takes_stop_texts = takes_stop_texts
        self._stop_text_limits = stop_text_limits
        self._limit = trajectory.max_context_len
        self._turns: dict[bytes, list[_Turn]] = {}  # by the messages through the answer
        self._texts: dict[str, str] = {}  # message with tool calls -> the text that the model wrote
        self._samples: list[tuple[int, Sample]] = []  # with the number of its first call
        self._last_answer: Answer | None = None
        self._calls = 0
        self._answering: set[asyncio.Task[Answer]] = set()
        self._others_work = 0  # ``not_its_own`` blocks that run, one per call that is being answered
        self._own_seconds = 0.0
        self._idle_since = time.monotonic()
        self.idle.set()

    @property
    def own_seconds(self) -> float:
        """The seconds that the program has worked on its own."""
        return self._own_seconds + (time.monotonic() - self._idle_since if self.idle.is_set() else 0.0)

    @property
    def last_message(self) -> str:
        """The content of the last answer; empty without one."""
        return "" if self._last_answer is None else self._last_answer.content

    @contextmanager
    def not_its_own(self) -> Iterator[None]:
        """Leave the time of this block out of ``own_seconds``."""
        if not self._others_work:
            self._own_seconds = self.own_seconds
            self.idle.clear()
            self.busy.set()
        self._others_work += 1
        try:
            yield
        finally:
            self._others_work -= 1
            if not self._others_work:
                self._idle_since = time.monotonic()
                self.busy.clear()
                self.idle.set()

    async def answer(self, call: ChatRequest) -> Answer:
        """Have the model answer a call, and record the tokens.

        A call that is cancelled, as by a client that has gone, is not recorded.

        Raises:
            ApiError: The call cannot be answered. A failure in the engine ends the session as well.
        """
        if self.ended.is_set():
            raise _ended()
        task = asyncio.ensure_future(self._answer(call))
        self._answering.add(task)
        try:
            with self.not_its_own():
                return await task
        except asyncio.CancelledError:
            if self.ended.is_set():
                raise _ended() from None
            raise
        finally:
            self._answering.discard(task)

    async def close(self) -> None:
        """End the calls that are being answered. No further one is answered."""
        self.ended.set()
        await cancel_all(self._answering)

    def samples(self, response: str, failure: str = "") -> list[Sample]:
        """Return the samples of the trajectory, in the order of their first calls.

        If no call was answered, it is one ``ABORTED`` sample without a response.

        Args:
            response: The trajectory's answer, which rewards see of each of them.
            failure: Why the program failed, if it did.
        """
        samples = [sample for _, sample in sorted(self._samples, key=lambda entry: entry[0])]
        if not samples:
            samples = [replace(self._trajectory.sample, status=SampleStatus.ABORTED)]
        elif self.refused_for_room:
            samples[-1].status = SampleStatus.TRUNCATED
        for sample in samples:
            sample.response = response
            sample.failure = failure
        return samples

    @property
    def has_answered(self) -> bool:
        """Whether a call was answered."""
        return bool(self._samples)

    async def _answer(self, call: ChatRequest) -> Answer:
        stop_texts = self._stop_texts(call)
        call = replace(call, messages=self._chat.with_images(call.messages))
        digests = _digests(call)
        place = self._place(call, digests)
        number = self._calls
        self._calls += 1
        if place.turn is not None:
            place.turn.continued = True
        try:
            generation = await self._generate(call, stop_texts, place, number)
        except BaseException:
            if place.turn is not None:
                place.turn.continued = False
            raise
        turn = self._record(place, generation, number)
        if generation.finish_reason == "abort":
            self.ended.set()
            raise _ended()
        answer = self._read(call, place, generation, number, stop_texts)
        [message] = read_messages([answer.message])
        key = message_key(message)
        self._turns.setdefault(_digest(digests[-1], key), []).append(turn)
        if answer.tool_calls:
            self._texts[key] = self._chat.text(generation, stop_texts)
        self._last_answer = answer
        return answer

    def _stop_texts(self, call: ChatRequest) -> tuple[str, ...]:
        """Return the texts of the run and of ``call``, each once. Raises ``ApiError`` if the engine refuses them."""
        of_run = self._trajectory.sampling.stop_texts
        if not call.stop:
            return of_run
        if not self._takes_stop_texts:
            raise ApiError("stop: this run takes no stop texts (docs/agents.md); leave it out", param="stop")
        texts = tuple(dict.fromkeys((*of_run, *call.stop)))
        limits = self._stop_text_limits
        if limits is None:
            return texts
        if len(texts) > limits.number:
            room = limits.number - len(of_run)
            raise ApiError(
                f"stop: the engine takes at most {limits.number} texts, {len(of_run)} of them from --rollout-stop; "
                + (f"give at most {room} others" if room else "give no others"),
                param="stop",
            )
        for text in call.stop:
            if (why := limits.why_not(text)) is not None:
                raise ApiError(
                    f"stop {one_line(text, 40)!r}: the engine {why}; give a part of the text that occurs nowhere else",
                    param="stop",
                )
        return texts

    def _place(self, call: ChatRequest, digests: Sequence[bytes]) -> _Place:
        """Find the longest beginning of the conversation that was sampled, and room for an answer.

        Raises:
            ApiError: There is no room, or the template refuses the messages.
        """
        # Answers with tool calls as the text that the model wrote, so that they are rendered identically.
        texts = [self._texts.get(message_key(each)) if "tool_calls" in each else None for each in call.messages]
        messages = [
            message if text is None else {"role": "assistant", "content": text}
            for message, text in zip(call.messages, texts, strict=True)
        ]
        for answered in range(len(messages), 0, -1):
            turns = self._turns.get(digests[answered])
            if turns is None:
                continue
            turn = next((turn for turn in turns if not turn.continued), turns[-1])
            known = turn.token_ids
            continuation = self._chat.continuation(messages, answered, call.tools, known, turn.images)
            if continuation is None:
                continue
            new, images = continuation
            if turn.continued:
                return self._with_room(None, [*known, *new], [], images)
            return self._with_room(turn, [*known, *new], new, images)
        prompt_ids, images = self._chat.prompt(messages, call.tools)
        of_row = self._trajectory.sample.prompt.images  # one object for all samples of a group
        return self._with_room(None, prompt_ids, [], of_row if images == of_row else images)

    def _with_room(
        self, turn: _Turn | None, prompt_ids: list[int], read: list[int], images: PromptImages | None
    ) -> _Place:
        longest = self._trajectory.sampling.max_new_tokens
        in_response = longest - (0 if turn is None else turn.end + len(read))
        in_context = self._limit - len(prompt_ids)
        if min(in_response, in_context) < 1:
            self.refused_for_room = True
            if in_context < 1:
                limit = f"this model's maximum context length is {self._limit} tokens (--rollout-max-context-len)"
            else:
                limit = f"a conversation may have {longest} tokens behind its first prompt (--rollout-max-response-len)"
            raise ApiError(
                f"{limit}, and the messages have {len(prompt_ids)}, which leaves no room for an answer; shorten them",
                param="messages",
                code=OUT_OF_ROOM,
            )
        self.refused_for_room = False  # the program has found a way to continue
        return _Place(turn, prompt_ids, read, min(in_response, in_context), images)

    async def _generate(self, call: ChatRequest, stop_texts: tuple[str, ...], place: _Place, number: int) -> Generation:
        longest = min(place.room, call.max_tokens or place.room)
        sampling = replace(self._trajectory.sampling, max_new_tokens=longest, stop_texts=stop_texts)
        seeds = (self._trajectory.seed_of_turn(number),)
        request = GenerationRequest(tuple(place.prompt_ids), seeds, sampling, place.images)
        try:
            [generation] = await self._trajectory.engine.generate(request)
        except Exception as error:  # whatever the engine raises ends the trajectory, as without a program
            self.error = error
            self.ended.set()
            raise ApiError("the engine failed, which ends the run", status=500) from error
        return generation

    def _record(self, place: _Place, generation: Generation, number: int) -> _Turn:
        """Add the tokens to the sample, or to a new one."""
        if place.turn is not None:
            sample = place.turn.sample
            assert len(sample.response_ids) == place.turn.end, "one call only continues an answer"
            if place.images is not sample.prompt.images:
                sample.prompt = replace(sample.prompt, images=place.images)
        else:
            ids = place.prompt_ids if place.images is None else place.images.unexpanded(place.prompt_ids)
            text = str(self._chat.tokenizer.decode(ids, skip_special_tokens=False))
            first = self._trajectory.sample
            prompt = replace(first.prompt, text=text, token_ids=tuple(place.prompt_ids), images=place.images)
            sample = Sample(prompt, first.group_index, first.trajectory_id)
            if generation.token_ids:
                self._samples.append((number, sample))
        extend(sample, place.read)
        extend(sample, generation.token_ids, generation)
        sample.status = STATUS[generation.finish_reason]
        return _Turn(sample, len(sample.response_ids), place.images)

    def _read(
        self, call: ChatRequest, place: _Place, generation: Generation, number: int, stop_texts: tuple[str, ...]
    ) -> Answer:
        """Make the answer of sampled tokens: its text ends before a text of ``stop``, and tool calls are parsed."""
        content = self._chat.text(generation, stop_texts)
        ends = [end for stop in call.stop if (end := content.find(stop)) >= 0]
        content = content[: min(ends, default=None)]
        content, tool_calls = parse_tool_calls(content) if call.tools else (content, [])
        finish = str(generation.finish_reason)
        if tool_calls and finish == "stop":
            finish = "tool_calls"
        return Answer(number, content, tuple(tool_calls), finish, len(place.prompt_ids), len(generation.token_ids))


def _ended() -> ApiError:
    return ApiError("the trajectory has ended, and no further call is answered", status=503)


def _digests(call: ChatRequest) -> list[bytes]:
    """Return a digest of the tools with each beginning of the messages: 0, 1, … all of them."""
    digests = [_digest(b"", repr(call.tools))]
    for message in call.messages:
        digests.append(_digest(digests[-1], message_key(message)))
    return digests


def _digest(before: bytes, key: str) -> bytes:
    return blake2b(key.encode(), key=before, digest_size=32).digest()
