"""Disks without room: one of 1 MiB that is full, and a limit of the size of files, which needs no rights."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted_disk(folder: Path) -> Iterator[Path]:
    """Mount an empty disk of 1 MiB at ``folder``, which needs the right to mount: without it the test is skipped."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("may not mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Have the kernel refuse bytes beyond ``size`` of every file that this process writes, as a quota does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def fill(disk: Path) -> Path:
    """Write a file that leaves no byte free, and return it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    return filler
