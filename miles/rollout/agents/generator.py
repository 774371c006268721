"""Trajectories made by an agent program: ``--agent-command``."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from miles.base.input_error import InputError
from miles.config.settings import Settings
from miles.rollout.agents.program import ProgramEnd, environment_of, row_of, run_program
from miles.rollout.agents.server import MODEL, SessionServer
from miles.rollout.agents.session import Session
from miles.rollout.agents.session_generator import SessionGenerator
from miles.rollout.trajectory import Trajectory
from miles.types.sample import Sample, SampleStatus


class AgentGenerator(SessionGenerator):
    """A ``GroupGenerator`` that runs a program for every trajectory, and records what the model answers to its calls.

    The server starts with the first group. At most ``--agent-concurrency`` programs run at a time.
    """

    def __init__(self, settings: Settings) -> None:
        """Raise ``InputError`` if the program is not on this machine."""
        rollout = settings.rollout
        assert rollout.agent_command is not None
        self._command = shlex.split(rollout.agent_command)
        super().__init__(settings, f"--agent-command {shlex.join(self._command)}")
        if shutil.which(self._command[0]) is None:
            raise InputError(
                f"--agent-command {rollout.agent_command}: {self._command[0]} is no program that can be run from "
                f"{os.getcwd()}; give its path, or a name in PATH"
            )
        self._places = asyncio.Semaphore(rollout.agent_concurrency)
        self._starting = asyncio.Lock()
        self._server: SessionServer | None = None
        self._closed = False
        self._running = 0
        self._nothing_runs = asyncio.Event()
        self._nothing_runs.set()

    async def close(self) -> None:
        """End the programs, and stop the server. No further program starts: what waits for one is ``ABORTED``."""
        self._closed = True
        async with self._starting:  # a server that is starting is stopped as well
            if self._server is not None:
                await self._server.close()
        await self._nothing_runs.wait()

    async def _started(self) -> SessionServer | None:
        """Return the server, which the first call starts; None after ``close``."""
        async with self._starting:
            if self._closed:
                return None
            if self._server is None:
                self._server = await SessionServer.start()
            return self._server

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        """Count a program while it runs, for ``close``."""
        self._running += 1
        self._nothing_runs.clear()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._nothing_runs.set()

    async def _run(self, trajectory: Trajectory) -> list[Sample]:
        """Run the program for one trajectory."""
        async with self._places:
            server = await self._started()
            if server is None:
                return [replace(trajectory.sample, status=SampleStatus.ABORTED)]
            session = self._session(trajectory)
            async with server.serving(session) as key, self._counted():
                environment = environment_of(server.url, key, MODEL, os.environ)
                row = row_of(trajectory.sample.prompt)
                end = await run_program(self._command, row, environment, session, self._seconds)
                aborted = session.ended.is_set()
        if session.error is not None:
            raise session.error
        failure = "" if aborted else self._failure(session, end)
        failure = f"the program of --agent-command {failure}" if failure else ""
        return session.samples(end.last_line or session.last_message, failure)

    def _failure(self, session: Session, end: ProgramEnd) -> str:
        """Return what is wrong with a trajectory whose program has ended or was killed for its time; empty if nothing.

        However a program ends after its conversation has become too long, that is the model's length and not the
        program's fault. Without any answer there is nothing to score.
        """
        errors = f"its standard error ends with {end.errors!r}"
        if session.refused_for_room:
            if session.has_answered:
                return ""
            return (
                "made no call that was answered: the messages leave no room for an answer "
                f"(--rollout-max-context-len); {errors}"
            )
        if end.status is None:
            return f"took more than {self._seconds:g} s by itself (--agent-timeout); {errors}"
        if end.status == 0 and not session.has_answered:
            return f"made no call that was answered; {errors}"
        return end.fault
