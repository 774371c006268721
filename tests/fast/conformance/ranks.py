"""Send cases to the ranks, from the test process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from rank_scripts import cpu_environment
from tiny_llama import save_tiny_llama

HERE = Path(__file__).parent
WORLDS = (1, 2, 3, 4)
SECONDS = 90  # a case takes far less than 1 s; a hanging collective must not hang the suite


class Ranks:
    """Process groups of every size, waiting for cases."""

    def __init__(self, connections: dict[tuple[int, int], Connection], folder: Path) -> None:
        self.folder = folder
        self._connections = connections

    def run(self, case: Any) -> Any:
        """Run a case and return rank 0's result. Raise ``AssertionError`` with the traceback of a failed rank."""
        world = case.layout.ranks
        members = [self._connections[world, rank] for rank in range(world)]
        for connection in members:
            connection.send(case)
        answers = []
        for rank, connection in enumerate(members):
            if not connection.poll(SECONDS):
                stacks = (self.folder / "log").read_text()[-20_000:]  # of every rank that took long
                raise AssertionError(f"rank {rank} of {world} did not answer within {SECONDS} s\n{stacks}")
            answers.append(connection.recv())
        for rank, (outcome, answer) in enumerate(answers):
            assert outcome == "done", f"rank {rank} of {world}\n{answer}"
        return answers[0][1]

    def close(self) -> None:
        for connection in self._connections.values():
            connection.send(None)


@contextmanager
def started_ranks(folder: Path, worlds: Sequence[int] = WORLDS) -> Iterator[Ranks]:
    """Save the two dense models in ``folder``, and start ranks that load the models of their cases from it."""
    for name in ("untied", "tied"):
        save_tiny_llama(folder / name, tied=name == "tied")
    address = str(folder / "line")
    with Listener(address, backlog=sum(worlds)) as listener, (folder / "log").open("w") as log:
        command = [sys.executable, str(HERE / "rank.py"), address, str(folder), *map(str, worlds)]
        process = subprocess.Popen(command, env=cpu_environment(), stdout=log, stderr=log)
        connections = {}
        for _ in range(sum(worlds)):
            connection = listener.accept()
            connections[connection.recv()] = connection
        ranks = Ranks(connections, folder)
        yield ranks
        ranks.close()
        process.wait(SECONDS)
