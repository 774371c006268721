"""Run an agent program once: in a process group of its own, within its time, and leave nothing of it behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from miles.base.one_line import one_line
from miles.base.secret_values import is_secret
from miles.rollout.agents.session import Session
from miles.types.sample import Prompt

MAX_OUTPUT = 1 << 16  # bytes of either output that are kept, from its end
SHOWN = 400  # characters of standard error in a message
DRAIN_SECONDS = 2.0  # for the rest of the output; a process that has left the group may hold it open
_CHILD = Path(__file__).with_name("child.py")


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

    @property
    def fault(self) -> str:
        """What is wrong, with the end of standard error; empty after status 0."""
        if self.status == 0:
            return ""
        if self.status is None:
            fault = "was killed"
        else:
            fault = f"exited with status {self.status}" if self.status > 0 else f"was killed by signal {-self.status}"
        return f"{fault}; its standard error ends with {self.errors!r}"


def row_of(prompt: Prompt) -> str:
    """Return what a program reads of its prompt: a JSON object."""
    row = {"input": prompt.input, "label": prompt.label, "metadata": prompt.metadata, "source": prompt.source}
    return json.dumps(row, default=str) + "\n"


def environment_of(url: str, key: str, model: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program: ``given`` without its credentials, and the API's address.

    Proxies are not used for the API. Credentials are left out, since the program runs what a model writes.
    """
    public = {name: value for name, value in given.items() if not is_secret(name)}
    environment = {**public, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "OPENAI_MODEL": model}
    host = url.split("/")[2].split(":")[0]
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, [given.get(name, ""), host]))
    return environment


async def run_program(
    command: Sequence[str], row: str, environment: Mapping[str, str], session: Session, seconds: float
) -> ProgramEnd:
    """Run ``command`` until it ends, until the session ends, or until it has taken ``seconds`` by itself.

    The time in which calls are being answered does not count. In every case, cancellation included, the processes of
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
            # Pipes of its own: asyncio would wait until no process holds them, also one that has left the group.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_CHILD), str(os.getpid()), *command),
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
        with suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        for task in waiting[1:]:
            task.cancel()
        await waiting[0]
        await asyncio.wait(copying, timeout=DRAIN_SECONDS)
        for task in copying:
            task.cancel()
        await asyncio.gather(*waiting, *copying, return_exceptions=True)
    return _end(status, *(output.text for output in outputs))


def _end(status: int | None, output: str, errors: str) -> ProgramEnd:
    lines = [line for line in output.splitlines() if line.strip()]
    errors = errors.strip()
    start = "…" if len(errors) > SHOWN else ""
    return ProgramEnd(status, lines[-1].strip() if lines else "", start + one_line(errors[-SHOWN:], SHOWN))


async def time_is_up(session: Session, seconds: float) -> None:
    """Return when a program or an environment has taken ``seconds`` by itself."""
    while True:
        await session.idle.wait()
        try:
            async with asyncio.timeout(seconds - session.own_seconds):
                await session.busy.wait()
        except TimeoutError:
            return


class _Output:
    """The end of what a program writes."""

    def __init__(self) -> None:
        self._end = b""

    @property
    def text(self) -> str:
        """Return it as text."""
        return self._end.decode("utf-8", errors="replace")

    async def copy(self, pipe: int) -> None:
        """Read ``pipe`` to its end, and close it."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        file = os.fdopen(pipe, "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
        try:
            while read := await reader.read(MAX_OUTPUT):
                self._end = (self._end + read)[-MAX_OUTPUT:]
        finally:
            transport.close()
