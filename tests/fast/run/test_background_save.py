"""``--async-save``: a checkpoint appears when its files are written, with the same errors as a save that waits."""

import errno
import os
import threading
from concurrent.futures import wait
from types import SimpleNamespace

import pytest
from small_checkpoint import LAUNCHER, one_rank, tensors

from miles.base.disk_faults import WriteFailed
from miles.config.checkpoint import CheckpointArguments
from miles.config.model import ModelArguments
from miles.run import checkpoints
from miles.run.train_actor import TrainActor, TrainDriver
from miles.training.checkpoint_check import check_checkpoint
from miles.training.checkpoint_io import write_random_state


class Backend:
    """A backend of one rank that writes a small checkpoint, as FSDP does."""

    def save(self, folder, state, staged=None):
        import torch.distributed.checkpoint as dcp

        from miles.training.checkpoint_files import write_run_state
        from miles.training.checkpoint_io import StagingWriter

        with one_rank():
            dcp.save(tensors(), storage_writer=StagingWriter(folder, staged))
            write_random_state(folder)
            write_run_state(folder, "fsdp", state, {"steps_done": state["rollouts_done"]})


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Return a driver of one rank in this process, whose thread writes when ``disk`` is set, and the event ``disk``."""
    rank = TrainActor.__new__(TrainActor)  # Ray is left out
    rank.backend, rank.rank = Backend(), 0
    rank.trainer = SimpleNamespace(coefficients=SimpleNamespace(state=dict))  # no weights adapt
    made = TrainDriver.__new__(TrainDriver)
    made.settings = SimpleNamespace(
        checkpoint=CheckpointArguments(save=str(tmp_path), async_save=True, save_keep_last=1),
        model=ModelArguments(),
        trains_policy=lambda iteration: True,
    )
    made._saving = None
    made._workers = SimpleNamespace(results=lambda calls: [call() for call in calls], end=lambda actor: None)
    made.actors = [SimpleNamespace(written=SimpleNamespace(remote=lambda: rank.written))]
    made._on_all = lambda verb, *arguments: [getattr(rank, verb)(*arguments)]
    monkeypatch.setattr(checkpoints.ray, "get", lambda calls: [call() for call in calls])
    disk = threading.Event()
    flush = os.fsync

    def slow(number):
        name = os.readlink(f"/proc/self/fd/{number}")
        if ".distcp" in name:
            assert disk.wait(60)
        flush(number)

    monkeypatch.setattr(os, "fsync", slow)
    yield made, disk
    disk.set()
    if made._saving is not None:
        wait([made._saving], 60)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_appears_whole_when_its_files_are_written(tmp_path, driver):
    made, disk = driver
    made.save(2, LAUNCHER | {"rollouts_done": 2})
    assert names(tmp_path) == [".writing_iter_0000002"], "the save returns before the disk has it"
    disk.set()
    made.settle_save()
    assert names(tmp_path) == ["iter_0000002"]
    assert check_checkpoint(tmp_path / "iter_0000002").files > 3
    made.settle_save()  # nothing is left to wait for


def test_the_next_save_waits_for_the_one_before(tmp_path, driver):
    made, disk = driver
    made.save(2, LAUNCHER | {"rollouts_done": 2})
    threading.Timer(0.2, disk.set).start()
    made.save(4, LAUNCHER | {"rollouts_done": 4})
    assert "iter_0000002" in names(tmp_path)
    made.settle_save()
    assert names(tmp_path) == ["iter_0000004"], "the older one is removed when the newer one is complete"


def test_a_failure_stops_the_run_before_the_next_step_and_leaves_earlier_checkpoints(tmp_path, driver, monkeypatch):
    made, disk = driver
    disk.set()
    made.save(2, LAUNCHER | {"rollouts_done": 2})
    made.settle_save()

    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", lambda number, flush=os.fsync: full(number) if writes(number) else flush(number))
    made.save(4, LAUNCHER | {"rollouts_done": 4})
    wait([made._saving], 60)
    with pytest.raises(
        WriteFailed, match="the checkpoint after 4 iterations was not written, because the disk .* full"
    ):
        made.train([], 4)
    assert names(tmp_path) == ["iter_0000002"] and check_checkpoint(tmp_path / "iter_0000002")


def writes(number):
    return ".writing_iter_0000004/__0_0.distcp" in os.readlink(f"/proc/self/fd/{number}")


def test_a_run_that_fails_waits_for_its_checkpoint_and_a_signal_does_not(tmp_path, driver):
    made, disk = driver
    made.save(2, LAUNCHER | {"rollouts_done": 2})
    with pytest.raises(KeyboardInterrupt), made:
        raise KeyboardInterrupt
    assert names(tmp_path) == [".writing_iter_0000002"]
    with pytest.raises(FloatingPointError), made:
        threading.Timer(0.2, disk.set).start()
        raise FloatingPointError
    assert names(tmp_path) == ["iter_0000002"]
