"""Check this machine: cores, memory, temporary folder, disk, the loopback interface, leftovers of killed runs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import miles
from miles.base.flags import count
from miles.base.host.machine import GIB, available_bytes, cpu_quota, has_bf16, has_gpu, memory_bytes, num_cores
from miles.base.host.usable_amx import lacks_tile_palettes
from miles.base.one_line import one_line
from miles.commands.doctor_parts.finding import Finding, State

LOOPBACK = "127.0.0.1"
SHARED_MEMORY = Path("/dev/shm")
LEAST_MEMORY = 2 * GIB  # below it, torch and Ray alone do not fit
QUICKSTART_MEMORY = 7.5 * GIB  # of all processes of the quickstart (examples/quickstart/README.md)
LEAST_SHARED_MEMORY = 1.2 * GIB  # Ray's object store takes 1 GiB of it on CPU
LEAST_DISK = 1 * GIB
LEAST_PORTS = 1000
LEAST_FILES = 4096
LEFTOVERS = "miles.run.leftovers"  # runs in a process of its own, because it needs Ray
LONGEST_SOCKET = 107  # characters of the path of a socket (man 7 unix)


def check_host(folder: Path) -> Iterator[Finding]:
    """Yield the findings on the machine.

    Args:
        folder: Where runs would write.
    """
    yield check_cores()
    yield check_memory(memory_bytes(), available_bytes())
    yield check_shared_memory(SHARED_MEMORY)
    yield check_temp(Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()))
    yield check_disk("disk", folder)
    yield check_loopback()
    yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def check_cores() -> Finding:
    """Compare the cores of the machine with those that this process may use."""
    usable, quota, whole = num_cores(), cpu_quota(), os.cpu_count() or 1
    load = os.getloadavg()[0]
    facts = {"usable": usable, "quota": quota, "machine": whole, "load": load, "has_bf16": has_bf16()}
    found = f"{usable} of {whole} usable" if usable < whole else f"{usable}"
    found += f", load {load:.1f}" + (", bf16 arithmetic" if has_bf16() else "")
    found += " without AMX, whose tiles the host hides" if lacks_tile_palettes() else ""
    if quota is not None and quota < usable:
        what = "threads get in each other's way"
        found += f"; a control group limits this process to {quota:.2g} of them"
        return Finding("cores", State.NOTE, found, what, "raise the limit of the container or the job", facts)
    if load > usable / 2:
        return Finding("cores", State.NOTE, f"{found}: other processes are at work", "", "expect slow steps", facts)
    if not has_bf16() and not has_gpu():
        return Finding("cores", State.NOTE, f"{found}; bf16 is emulated", "", "give --fp32, which is faster", facts)
    return Finding("cores", State.OK, found, facts=facts)


def check_memory(limit: int, available: int) -> Finding:
    """Check what this process may use, and what of it is free.

    Args:
        limit: Bytes that the machine has, or a control group allows.
        available: Bytes of it that are free.
    """
    free = min(available, limit)
    found = f"{free / GIB:.1f} GiB free of {limit / GIB:.1f} GiB"
    facts = {"limit_bytes": limit, "available_bytes": available}
    remedy = "end other processes, or raise the limit"
    if free < LEAST_MEMORY:
        return Finding("memory", State.FAULT, found, "disables training", remedy, facts)
    if free < QUICKSTART_MEMORY:
        effect = f"the quickstart, which takes {QUICKSTART_MEMORY / GIB:g} GiB, may not fit"
        return Finding("memory", State.NOTE, found, effect, remedy, facts)
    return Finding("memory", State.OK, found, facts=facts)


def check_shared_memory(folder: Path) -> Finding:
    """Check that Ray's object store fits into shared memory."""
    if not folder.is_dir():
        remedy = f"mount a tmpfs at {folder}"
        return Finding("shared memory", State.NOTE, f"there is no {folder}", "Ray stores objects on disk", remedy)
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB in {folder}"
    facts = {"free_bytes": usage.free, "total_bytes": usage.total}
    if usage.free < LEAST_SHARED_MEMORY:
        remedy = "give the container more, for example docker run --shm-size=2g"
        return Finding("shared memory", State.NOTE, found, "Ray stores objects on disk, slowly", remedy, facts)
    return Finding("shared memory", State.OK, found, facts=facts)


def check_temp(folder: Path) -> Finding:
    """Check the folder of Ray's sockets and of the servers' files: its path is bounded, as sockets are in it."""
    name = "temporary folder"
    inside = f"/ray-{os.getuid()}/r12345678/session_2026-01-01_00-00-00_123456_1234567/sockets/plasma_store"
    longest = LONGEST_SOCKET - len(inside)
    if len(os.fsencode(folder)) > longest:
        found = f"{folder} is longer than the {longest} bytes that leave room for the path of Ray's sockets"
        return Finding(name, State.FAULT, found, "disables training", "set RAY_TMPDIR to a shorter path, such as /tmp")
    return check_disk(name, folder)


def check_disk(name: str, folder: Path) -> Finding:
    """Check that ``folder`` can be written, and has space."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")
    except OSError as error:
        remedy = "choose a folder that you can write to"
        return Finding(name, State.FAULT, f"{folder}: {error.strerror}", "disables training from here", remedy)
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / GIB:.1f} GiB free in {folder}"
    facts = {"folder": str(folder), "free_bytes": usage.free}
    if usage.free < LEAST_DISK:
        return Finding(name, State.NOTE, found, "checkpoints may not fit", "make room", facts)
    return Finding(name, State.OK, found, facts=facts)


def check_loopback() -> Finding:
    """Check that a server can listen on the loopback interface, and be reached there."""
    try:
        with closing(socket.create_server((LOOPBACK, 0))) as server:
            address = server.getsockname()
            with closing(socket.create_connection(address, timeout=5)):
                pass
    except OSError as error:
        remedy = "allow sockets on 127.0.0.1 (the interface lo)"
        return Finding("ports", State.FAULT, f"{LOOPBACK} cannot be used: {error}", "disables training", remedy)
    low, high = _free_range()
    facts = {"low": low, "high": high}
    if high - low < LEAST_PORTS:
        remedy = "widen net.ipv4.ip_local_port_range"
        return Finding(
            "ports",
            State.NOTE,
            f"only {low} to {high} for sockets",
            "limits the number of servers and requests",
            remedy,
            facts,
        )
    return Finding("ports", State.OK, f"{LOOPBACK} answers; {low} to {high} for sockets", facts=facts)


def _free_range() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return 1024, 65535
    return int(low), int(high)


def check_open_files(soft: int, hard: int) -> Finding:
    """Check the limit of open files: Ray, and servers with many requests, need thousands."""
    found, facts = f"up to {soft}", {"soft": soft, "hard": hard}
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        remedy = f"raise the hard limit, ulimit -Hn {LEAST_FILES}"
        return Finding("open files", State.NOTE, found, "limits requests to a server", remedy, facts)
    return Finding("open files", State.OK, found, facts=facts)


def check_leftovers(clean: bool, seconds: float) -> Finding:
    """Return what killed runs of this user left on this machine.

    Args:
        clean: Whether to remove it.
        seconds: The longest time to wait.
    """
    path = os.pathsep.join(filter(None, [str(Path(miles.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", LEFTOVERS, *(["--clean"] if clean else [])]
    try:
        ended = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=seconds
        )
        found = json.loads(ended.stdout.splitlines()[-1]) if ended.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return Finding("leftovers", State.NOTE, f"not known: no answer within {seconds:g} s (--timeout)")
    if found is None:
        last = one_line((ended.stderr.strip().splitlines() or ["no message"])[-1], 300)
        return Finding("leftovers", State.NOTE, f"not known: {last}")
    left = found["leftovers"]
    alive = f"; {count(found['alive'], 'run')} alive" if found["alive"] else ""
    if not left:
        return Finding("leftovers", State.OK, f"none{alive}", facts=found)
    kept = [each for each in left if not each["removed"]]
    processes = sum(len(each["pids"]) for each in left)
    megabytes = sum(each["size"] for each in left) / 1e6
    shown = f"{count(len(left), 'killed run')}: {processes} process{'' if processes == 1 else 'es'}"
    shown += f", {megabytes:.1f} MB{alive}"
    if not kept:
        return Finding("leftovers", State.OK, f"removed what was left of {shown}", facts=found)
    if clean:
        folders = ", ".join(each["folder"] for each in kept)
        return Finding(
            "leftovers",
            State.NOTE,
            f"could not remove {folders}",
            "it holds memory or disk",
            "remove it by hand",
            found,
        )
    return Finding("leftovers", State.NOTE, shown, "it holds memory or disk", "miles doctor --clean", found)
