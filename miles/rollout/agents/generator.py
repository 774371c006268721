"""Trajectories made by an agent program: ``--agent-command``."""

import asyncio
import json
import os
import shlex
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from miles.base import processes
from miles.base.flags import json_object
from miles.base.secrets import is_secret
from miles.base.text import InputError, one_line
from miles.config.components import engine_spec
from miles.config.settings import Settings
from miles.engine.base import Engine
from miles.rollout.agents.chat import ChatFormat
from miles.rollout.agents.server import MODEL, SessionServer
from miles.rollout.agents.session import Session
from miles.rollout.groups import GroupSpec
from miles.rollout.trajectory import Trajectory, generate_trajectories
from miles.tasks.environments.base import opening
from miles.types.sample import Prompt, PromptGroup, Sample, SampleStatus

# The generator of trajectories by recorded calls: the part that agent programs and environments share.


class SessionGenerator(ABC):
    """A ``GroupGenerator`` that makes each trajectory by calls of the model, which a session records."""

    def __init__(self, settings: Settings, name: str) -> None:
        """Read the flags.

        Args:
            settings: The run.
            name: The flag and its value, for messages about a trajectory.
        """
        rollout = settings.rollout
        self._name = name
        self._seconds = rollout.agent_timeout
        self._data = settings.data
        self._template_kwargs = json_object("apply_chat_template_kwargs", settings.data.apply_chat_template_kwargs)
        # Servers have a tokenizer only under --rollout-stop. An answer that --partial-rollout has interrupted is
        # continued without the text before.
        engine = engine_spec(rollout.rollout_engine)
        sees_text = bool(rollout.stop_texts) or not engine.has_servers
        self._takes_stop_texts = sees_text and not rollout.partial_rollout
        self._stop_text_limits = engine.stop_text_limits
        self._chat: ChatFormat | None = None
        self._starting = asyncio.Lock()
        self._server: SessionServer | None = None
        self._closed = False
        self._sessions: set[Session] = set()
        self._nothing_runs = asyncio.Event()
        self._nothing_runs.set()

    async def __call__(self, group: PromptGroup, engine: Engine, tokenizer: Any, spec: GroupSpec) -> PromptGroup:
        """Return the group with its trajectories. See ``GroupGenerator``.

        A program or environment that fails leaves samples with a ``failure``, which are scored as ``--reward-error``
        states.

        Raises:
            Exception: Whatever the engine raises.
        """
        return await generate_trajectories(self._run, self._name, group, engine, tokenizer, spec)

    @abstractmethod
    async def _run(self, trajectory: Trajectory) -> list[Sample]:
        """Make one trajectory; ``ABORTED`` after ``close``."""

    async def close(self) -> None:
        """End the trajectories in progress, and stop the server. Later trajectories are ``ABORTED``."""
        self._closed = True
        for session in list(self._sessions):
            await session.close()
        await self._nothing_runs.wait()
        async with self._starting:  # a server that is starting is stopped as well
            if self._server is not None:
                await self._server.close()

    async def _started(self) -> SessionServer:
        """Return the server that is called by URL; the first call starts it."""
        async with self._starting:
            if self._server is None:
                self._server = await SessionServer.start()
            return self._server

    @asynccontextmanager
    async def _recording(self, trajectory: Trajectory) -> AsyncIterator[Session]:
        """Record the calls of ``trajectory`` inside the block. ``close`` ends the session, and waits for the block."""
        if self._chat is None:
            self._chat = ChatFormat(trajectory.tokenizer, self._template_kwargs, self._data)
        session = Session(
            trajectory, self._chat, takes_stop_texts=self._takes_stop_texts, stop_text_limits=self._stop_text_limits
        )
        self._sessions.add(session)
        self._nothing_runs.clear()
        try:
            yield session
        finally:
            await session.close()
            self._sessions.discard(session)
            if not self._sessions:
                self._nothing_runs.set()


# Run an agent program once: in a separate process group, within its time, and leave nothing of it behind.


MAX_OUTPUT = 1 << 16  # bytes of either output that are kept, from its end
ERROR_SIZE = 400  # characters of standard error in a message
DRAIN_SECONDS = 2.0  # for the rest of the output; a process that has left the group may hold it open


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended.

    Attributes:
        status: Its exit status, negative for the signal that killed it; None if it was killed here.
        last_line: The last line of its standard output that has text.
        errors: The end of its standard error, on one line.
    """

    status: int | None
    last_line: str
    errors: str


def row_of(prompt: Prompt) -> str:
    """Return the row of a prompt for its program: a JSON object. An input with images is messages that have them."""
    content = prompt.input if prompt.images is None else opening(prompt)
    row = {"input": content, "label": prompt.label, "metadata": prompt.metadata, "source": prompt.source}
    return json.dumps(row, default=str) + "\n"


def environment_of(url: str, key: str, model: str, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program: ``base`` without its credentials, and the API's address.

    Proxies are not used for the API. Credentials are left out, since the program runs model output.
    """
    public = {name: value for name, value in base.items() if not is_secret(name)}
    environment = {**public, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "OPENAI_MODEL": model}
    host = url.split("/")[2].split(":")[0]
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, [base.get(name, ""), host]))
    return environment


async def run_program(
    command: Sequence[str], row: str, environment: Mapping[str, str], session: Session, seconds: float
) -> ProgramEnd:
    """Run ``command`` until it ends, until the session ends, or until it has taken ``seconds`` on its own.

    The time during which calls are answered does not count. In every case, cancellation included, the processes of
    its group are killed before this returns.

    Args:
        command: The program and its arguments.
        row: The line that it reads from standard input.
        environment: All its environment variables.
        session: Answers its calls.
        seconds: Its time.
    """
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryFile() as standard_input:
        standard_input.write(row.encode())
        standard_input.seek(0)
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        try:
            # Separate pipes: asyncio would wait until no process holds its own, also one that has left the group.
            process = await asyncio.create_subprocess_exec(
                *processes.killed_with_parent(*command),
                stdin=standard_input,
                stdout=writers[0],
                stderr=writers[1],
                env=dict(environment),
                start_new_session=True,
            )
        except BaseException:
            for reader in readers:
                os.close(reader)
            raise
        finally:
            for writer in writers:
                os.close(writer)
    outputs = [_Output(), _Output()]
    copying = [loop.create_task(output.copy(reader)) for output, reader in zip(outputs, readers, strict=True)]
    waiting = [
        loop.create_task(process.wait()),
        loop.create_task(time_is_up(session, seconds)),
        loop.create_task(session.ended.wait()),
    ]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        status = process.returncode
    finally:
        processes.kill_group(process.pid)
        for task in waiting[1:]:
            task.cancel()
        await waiting[0]
        await asyncio.wait(copying, timeout=DRAIN_SECONDS)
        for task in copying:
            task.cancel()
        await asyncio.gather(*waiting, *copying, return_exceptions=True)
    output, errors = (each.end.decode("utf-8", errors="replace").strip() for each in outputs)
    last_line = output.splitlines()[-1].strip() if output else ""
    start = "…" if len(errors) > ERROR_SIZE else ""
    return ProgramEnd(status, last_line, start + one_line(errors[-ERROR_SIZE:], ERROR_SIZE))


async def time_is_up(session: Session, seconds: float) -> None:
    """Return when a program or an environment has taken ``seconds`` on its own."""
    while True:
        await session.idle.wait()
        try:
            async with asyncio.timeout(seconds - session.own_seconds):
                await session.busy.wait()
        except TimeoutError:
            return


class _Output:
    """The end of a program's output."""

    def __init__(self) -> None:
        self.end = b""

    async def copy(self, pipe: int) -> None:
        """Read ``pipe`` to its end, and close it."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        file = os.fdopen(pipe, "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
        try:
            while read := await reader.read(MAX_OUTPUT):
                self.end = (self.end + read)[-MAX_OUTPUT:]
        finally:
            transport.close()


class AgentGenerator(SessionGenerator):
    """A ``GroupGenerator`` that runs a program for every trajectory, and records the model's answers to its calls.

    The server starts with the first group. At most ``--agent-concurrency`` programs run at once.
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

    async def _run(self, trajectory: Trajectory) -> list[Sample]:
        """Run the program for one trajectory."""
        async with self._places:
            if self._closed:
                return [replace(trajectory.sample, status=SampleStatus.ABORTED)]
            async with self._recording(trajectory) as session:
                server = await self._started()
                async with server.serving(session) as key:
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
        """Return the fault of a trajectory whose program has ended or was killed for its time; empty if none.

        However a program ends after its conversation has become too long, that is the model's length and not the
        program's fault. Without any answer there is nothing to score.
        """
        errors = f"its standard error ends with {end.errors!r}"
        if session.refused_for_room:
            if session.has_answered:
                return ""
            reason = "the messages leave no room for an answer (--rollout-max-context-len)"
            return f"made no call that was answered: {reason}; {errors}"
        if end.status is None:
            return f"took more than {self._seconds:g} s on its own (--agent-timeout); {errors}"
        if end.status == 0:
            return "" if session.has_answered else f"made no call that was answered; {errors}"
        how = f"exited with status {end.status}" if end.status > 0 else f"was killed by signal {-end.status}"
        return f"{how}; {errors}"
