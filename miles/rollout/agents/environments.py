"""Trajectories in environments: ``--environment``."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from miles.base.text import name_and_words, one_line
from miles.base.threads import cancel_all
from miles.base.user_code import UserCodeError, ordinary_errors, while_waiting
from miles.config.settings import Settings
from miles.rollout.agents.chat import OUT_OF_ROOM, ApiError, ChatRequest, read_messages
from miles.rollout.agents.generator import SessionGenerator, time_is_up
from miles.rollout.agents.server import SessionServer
from miles.rollout.agents.session import Session
from miles.rollout.trajectory import Trajectory
from miles.tasks.environments.base import ConversationTooLong, Environment, Message
from miles.tasks.environments.chosen import environment_maker
from miles.tasks.rewards.base import NotAReward, as_reward
from miles.types.sample import Sample, SampleStatus


class RecordedModel:
    """A ``Model`` whose answers a session records."""

    def __init__(self, session: Session, server: SessionServer | None) -> None:
        self.url = "" if server is None else server.url
        self._session = session
        self._server = server

    async def answer(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), max_tokens: int | None = None
    ) -> Message:
        """Return the model's answer. See ``Model``.

        Raises:
            ApiError: A message is malformed, the chat template refuses the messages, or the engine fails.
        """
        call = ChatRequest(messages=read_messages(messages), tools=tuple(map(dict, tools)), max_tokens=max_tokens)
        try:
            return (await self._session.answer(call)).message
        except ApiError as error:
            if error.code == OUT_OF_ROOM:
                raise ConversationTooLong(str(error)) from error
            raise

    def accept(self, session_id: str) -> None:
        """Take calls with this id as calls of the session. See ``Model``."""
        assert self._server is not None, "an environment that calls by URL says needs_url"
        self._server.accept(session_id, self._session)


class EnvironmentGenerator(SessionGenerator):
    """A ``GroupGenerator`` that plays every trajectory in a separate environment, all of them at once."""

    def __init__(self, settings: Settings) -> None:
        """Raise ``InputError`` if the environment is not there."""
        rollout = settings.rollout
        assert rollout.environment is not None
        super().__init__(settings, f"--environment {rollout.environment}")
        self._make = environment_maker(rollout.environment)
        self._max_turns = rollout.max_turns

    async def close(self) -> None:
        """End the trajectories, and the objects that the environments share. Later trajectories are ``ABORTED``."""
        await super().close()
        if (close := getattr(self._make, "close", None)) is not None:
            await close()

    async def _run(self, trajectory: Trajectory) -> list[Sample]:
        """Play one trajectory."""
        if self._closed:
            return [replace(trajectory.sample, status=SampleStatus.ABORTED)]
        async with self._recording(trajectory) as session:
            reward, failure = await self._play(trajectory, session)
        if session.error is not None:
            raise session.error
        samples = session.samples(session.last_message, failure and f"{self._name} {failure}")
        for sample in samples:
            sample.environment_reward = reward
        return samples

    async def _play(self, trajectory: Trajectory, session: Session) -> tuple[float | None, str]:
        """Return the reward and the failure; neither for a trajectory that is ended from outside."""
        async with AsyncExitStack() as stack:
            try:
                with ordinary_errors(""):
                    environment = self._make(trajectory.sample.prompt)
                if fault := self._prepare(environment):
                    return None, fault
                server = await self._started() if environment.needs_url else None
                if server is not None:
                    await stack.enter_async_context(server.serving(session))
                with while_waiting(session.not_its_own):
                    playing = asyncio.ensure_future(_played(environment, RecordedModel(session, server)))
            except Exception as error:  # whatever the environment's code raises
                return None, _raised(error)
            waiting = [
                asyncio.ensure_future(each) for each in (time_is_up(session, self._seconds), session.ended.wait())
            ]
            try:
                await asyncio.wait([playing, *waiting], return_when=asyncio.FIRST_COMPLETED)
                if session.ended.is_set():
                    return None, ""
                if not playing.done():
                    return None, f"took more than {self._seconds:g} s on its own (--agent-timeout)"
                return _outcome(playing, session)
            finally:
                await cancel_all((playing, *waiting))

    def _prepare(self, environment: Any) -> str:
        """Set the limit of its turns. Return why it cannot be played; empty if it can."""
        if not isinstance(environment, Environment):
            return f"returned {type(environment).__name__}, which is no Environment"
        if self._max_turns is not None:
            if type(environment).play is not Environment.play:
                return "has a separate loop (play), which --max-turns cannot bound; drop that flag"
            environment.max_turns = self._max_turns
        return ""


async def _played(environment: Environment, model: RecordedModel) -> float:
    """Play it to its end; an error that is no ``Exception`` must not reach the event loop."""
    with ordinary_errors(""):
        return await environment.play(model)


def _outcome(playing: asyncio.Future[float], session: Session) -> tuple[float | None, str]:
    """Return the reward of an environment that has ended, or its fault."""
    if playing.cancelled():  # by its own code: nothing else has cancelled it yet
        return None, "raised CancelledError"
    error = playing.exception()
    if error is not None:
        return None, _raised(error)
    reward = playing.result()
    if not session.has_answered:
        reason = "the messages leave no room for an answer" if session.refused_for_room else "it never called the model"
        return None, f"made no call that was answered: {reason}"
    number = as_reward(reward)
    if isinstance(number, NotAReward):
        return None, number.replace("returned", "gave the reward", 1)
    return number, ""


def _raised(error: BaseException) -> str:
    raised = error.__cause__ if isinstance(error, UserCodeError) and error.__cause__ is not None else error
    return f"raised {one_line(name_and_words(raised), 300)}"
