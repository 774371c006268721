"""A Ray cluster of several hosts, each as ``ray start`` makes it, with its own address on this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from ray._private import services

from tests.fast.run.held.held_command import HeldCommand
from tests.fast.support.ray_head import ENVIRONMENT, RAY, free_ports

FEW_PROCESSES = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
}


class Host:
    """The processes of one host of a cluster: Ray's own, and the workers that it has started."""

    def __init__(self, log: Path, words: list[str], environment: dict[str, str]) -> None:
        fixed = ["--disable-usage-stats", "--dashboard-agent-listen-port=0", "--object-store-memory=100000000"]
        command = [*RAY, "start", *fixed, *words]
        with log.open("w") as output:
            self._ray = HeldCommand(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            assert self._ray.wait(300) == 0, log.read_text()
        except BaseException:
            self.end()
            raise
        self._of_ray = {process.pid for process in self.processes()}

    def processes(self) -> list[psutil.Process]:
        """Return the processes of this host that are alive."""
        return self._ray.processes()

    def workers(self) -> list[psutil.Process]:
        """Return the processes of this host that are alive and were not there when Ray had started."""
        return [process for process in self.processes() if process.pid not in self._of_ray]

    def named(self, name: str) -> psutil.Process:
        """Return the process of this program of Ray."""
        return next(process for process in self.processes() if process.name() == name)

    def kinds(self) -> set[str]:
        """Return the classes of the actors on this host."""
        classes = set()
        for process in self.processes():
            with suppress(psutil.Error):
                words = process.cmdline()
                if words and words[0].startswith("ray::") and "Actor" in words[0]:
                    classes.add(words[0].removeprefix("ray::").split(".")[0].split()[0])
        return classes

    def end(self) -> None:
        """End its remaining processes."""
        self._ray.end()


class Hosts:
    """A head and other hosts."""

    def __init__(self, folder: Path, environment: dict[str, str], cpus: Sequence[int]) -> None:
        """Start Ray on each host.

        Args:
            folder: For logs and Ray's files; short, as sockets are in it.
            environment: Further variables of Ray's processes, and so of the workers that they start.
            cpus: The CPUs of each host, the head first.
        """
        (port,) = free_ports(1)
        self.address = f"{services.get_node_ip_address()}:{port}"
        self.token = {name: ENVIRONMENT[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
        self.folder = folder
        self._environment = os.environ | FEW_PROCESSES | environment | self.token
        self._hosts: list[Host] = []
        try:
            self._add("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}/h", cpus=cpus[0])
            for number in cpus[1:]:
                self.add(number)
        except BaseException:
            self.end()
            raise

    @property
    def head(self) -> Host:
        return self._hosts[0]

    @property
    def others(self) -> list[Host]:
        return self._hosts[1:]

    @property
    def second(self) -> Host:
        return self._hosts[1]

    def workers(self) -> list[psutil.Process]:
        """Return the workers of all hosts that are alive, and what they have started."""
        return [process for host in self._hosts for process in host.workers()]

    def add(self, cpus: int) -> Host:
        """Start Ray on another host."""
        address = f"127.0.0.{len(self._hosts) + 1}"
        return self._add(f"--address={self.address}", f"--node-ip-address={address}", cpus=cpus)

    def _add(self, *words: str, cpus: int) -> Host:
        log = self.folder / f"host_{len(self._hosts)}.log"
        self._hosts.append(Host(log, [*words, f"--num-cpus={cpus}"], self._environment))
        return self._hosts[-1]

    def end(self) -> None:
        """End the remaining processes of all hosts."""
        for host in reversed(self._hosts):
            host.end()
