"""The protocol of an environment: reset, step, tools, reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar, Protocol

from miles.base.choices import Choice
from miles.types.sample import Prompt

Message = Mapping[str, Any]  # as in OpenAI's chat API: role, content, tool_calls, tool_call_id


class ConversationTooLong(Exception):
    """The messages leave no room for an answer (``--rollout-max-context-len``, ``--rollout-max-response-len``)."""


class Model(Protocol):
    """The model of one trajectory. Its answers are recorded token by token and trained on.

    Attributes:
        url: The base URL at which the same model answers calls of OpenAI's chat API.
    """

    url: str

    async def answer(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), max_tokens: int | None = None
    ) -> Message:
        """Return the model's answer to a conversation, a message of role assistant, of ``max_tokens`` tokens at most.

        Raises:
            ConversationTooLong: There is no room for an answer.
        """
        ...

    def accept(self, session_id: str) -> None:
        """Take calls at ``url`` whose header ``X-Session-ID`` is ``session_id`` as calls of this trajectory."""
        ...


class Environment(ABC):
    """One trajectory: an object is made for it and used once. All methods run in the rollout process's event loop.

    Attributes:
        needs_url: Whether the environment calls the model at ``Model.url``.
        max_tokens: The tokens of one answer, at most; None for as many as there is room for.
        max_turns: Answers of the model, at most; None for any number. ``--max-turns`` sets it.
    """

    needs_url: ClassVar[bool] = False
    max_tokens: ClassVar[int | None] = None
    max_turns: int | None = None

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the chat template shows to the model, in the form of OpenAI's API; read in every turn."""
        return ()

    @abstractmethod
    async def reset(self) -> Sequence[Message]:
        """Return the messages that begin the conversation."""

    @abstractmethod
    async def step(self, answer: Message) -> Sequence[Message]:
        """Return the messages that follow the model's answer; none end the trajectory."""

    @abstractmethod
    async def reward(self) -> float:
        """Return the reward of the trajectory, also of one that was cut because it had become too long."""

    async def play(self, model: Model) -> float:
        """Take the trajectory to its end, and return its reward.

        An environment that has a loop of its own, such as one of a library, overrides this. What ``step`` says to the
        last of ``max_turns`` answers is not read by the model.
        """
        messages = list(await self.reset())
        try:
            for turn in count(1):
                answer = await model.answer(messages, self.tools, self.max_tokens)
                reply = await self.step(answer)
                if not reply or turn == self.max_turns:
                    break
                messages += [answer, *reply]
        except ConversationTooLong:
            pass  # the trajectory ends here, truncated
        return await self.reward()


EnvironmentMaker = Callable[[Prompt], Environment]  # called once per trajectory, with its row


class EnvironmentKind(Choice):
    """Environments that ``--environment`` names: one file each in ``built_in/``, found by its name.

    Attributes:
        options: The settings that may follow the name, each with its default.
        imports: Those of them that are import paths, each with what it names.
        has_reward: Whether it gives a reward, for ``--rm-type environment``.
        bounds_turns: Whether it reads ``max_turns``.
        libraries: Modules beyond those of a plain install, each as ``module with pip install NAME``.
    """

    flag = "environment"
    options: ClassVar[Mapping[str, Any]] = {}
    imports: ClassVar[Mapping[str, str]] = {}
    has_reward: ClassVar[bool] = True
    bounds_turns: ClassVar[bool] = True
    libraries: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def maker(self, options: Mapping[str, Any]) -> EnvironmentMaker:
        """Return what makes the environments of a run. If it has an async method ``close``, that is called at the end.

        Raises:
            InputError: An option has a value that it cannot have.
        """
