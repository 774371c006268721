"""A disk that fills while weights are written for engines ends the run with one sentence, and leaves no half file."""

import asyncio
from contextlib import contextmanager, nullcontext

import pytest
import torch
from small_checkpoint import save_checkpoint
from small_disk import file_limit, fill, mounted_disk

from miles.config.checkpoint import CheckpointArguments
from miles.engine.weight_sync.deltas import DeltaWriter, LocalCopy
from miles.engine.weight_sync.disk import DiskTransport
from miles.run.failures import exit_with_message
from miles.run.stop_requests import StopRequests
from miles.types.weights import WeightChunk

SHARED, COPY = "--update-weight-disk-dir", "--update-weight-copy-dir"


def weights(value):
    return [WeightChunk({"w": torch.full((2**15,), value)})]  # 128 KiB


@contextmanager
def full(disk):
    """Leave no byte of a real disk free."""
    filler = fill(disk)
    try:
        yield f"the disk tmpfs at {disk} (0 of 0.00105 GB free) is full"
    finally:
        filler.unlink()


@contextmanager
def limited(disk):
    """Allow no large file."""
    with file_limit(1000):
        yield "allows no file of this size (ulimit -f, or the file system's limit)"


@pytest.fixture(params=[full, limited])
def disk_without_room(tmp_path, request):
    """Return a folder, and what has room in it only outside of its block; that gives the words for it."""
    with mounted_disk(tmp_path / "disk") if request.param is full else nullcontext(tmp_path) as disk:
        yield disk, request.param


class Whole:
    """``disk``: all weights in the shared folder."""

    def __init__(self, disk):
        self.written, self.flag, self.root = disk / "version_0000002", SHARED, disk
        asyncio.run(DiskTransport(disk).write(weights(1.0), 1))

    def write(self):
        asyncio.run(DiskTransport(self.root).write(weights(2.0), 2))


class Delta:
    """With ``disk-delta`` the changed bytes are written to the shared folder."""

    def __init__(self, disk):
        self.written, self.flag, self.writer = disk / "delta_0000002", SHARED, DeltaWriter(disk)
        self.writer.update(weights(1.0))

    def write(self):
        self.writer.update(weights(2.0))


class Copy:
    """``disk-delta``: all weights in the copy of a host."""

    def __init__(self, disk):
        self.written, self.flag = disk / "copy", COPY

    def write(self):
        LocalCopy(self.written).adopt(weights(1.0), "1")


@pytest.mark.parametrize("way", [Whole, Delta, Copy])
def test_the_run_ends_with_a_sentence_that_names_file_disk_and_what_to_do(
    tmp_path_factory, disk_without_room, capsys, way
):
    disk, without_room = disk_without_room
    writer, saved = way(disk), tmp_path_factory.mktemp("save")
    save_checkpoint(saved, 2)
    before = sorted(disk.iterdir())
    with (
        pytest.raises(SystemExit) as ended,
        exit_with_message(CheckpointArguments(save=str(saved)), StopRequests(60.0)),
        without_room(disk) as words,
    ):
        writer.write()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("miles train: the run stopped: ") and str(writer.written) in line
    assert " was not written, because the disk " in line
    assert f"{words}; make room, or give another {writer.flag}; the same command with --load {saved} continues" in line
    if writer.flag == SHARED:
        assert sorted(disk.glob("*")) == before, "what is half written is removed, and the version before is kept"
