"""A save that fails because of the disk reports it in the last line, and leaves earlier checkpoints as they were."""

import errno
import os
import subprocess
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_checkpoint import one_rank, save_checkpoint
from small_disk import file_limit, mounted_disk

from miles.base.disk_faults import WriteFailed, disk_fault, naming_disk
from miles.base.locks import locked_folders
from miles.config.checkpoint import CheckpointArguments
from miles.config.model import ModelArguments
from miles.run.failures import exit_with_message
from miles.run.stop_requests import StopRequests
from miles.run.train_actor import TrainDriver
from miles.training.checkpoint_check import check_checkpoint
from miles.training.checkpoint_io import save_errors

WORDS = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "quota",
    errno.EROFS: "is read-only",
    errno.EACCES: "does not let this user write",
    errno.EFBIG: "ulimit",
    errno.EIO: "input/output error",
}


def driver(root, write):
    """Return a driver of one rank, whose files ``write`` makes."""
    made = TrainDriver.__new__(TrainDriver)  # the ranks of a real one are Ray actors
    made.settings = SimpleNamespace(checkpoint=CheckpointArguments(save=str(root)), model=ModelArguments())
    made._saving = None
    made._on_all = lambda verb, folder, state: [write(folder) or {}]
    return made


def wrapped(number):
    """Raise an error as PyTorch does: without the number, which is in an earlier error of the chain."""
    try:
        raise OSError(number, os.strerror(number))
    except OSError as error:
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed") from error


@pytest.mark.parametrize(("number", "words"), WORDS.items())
def test_the_fault_is_that_of_the_first_error_about_a_disk(tmp_path, number, words):
    with pytest.raises(RuntimeError) as raised:
        wrapped(number)
    fault = disk_fault(tmp_path / "not" / "there", raised.value)
    assert fault.startswith("the disk ") and words in fault and "GB free)" in fault


@pytest.fixture
def lost_disk(tmp_path, monkeypatch):
    """Return a folder whose file system is no longer mounted: the kernel answers nothing about it."""
    lost, stat = tmp_path / "lost", os.stat

    def answers(path, *args, **named):
        if str(path).startswith(str(lost)):
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return stat(path, *args, **named)

    monkeypatch.setattr(os, "stat", answers)
    return lost


def test_a_disk_that_is_lost_is_named_and_the_last_line_says_how_to_resume(lost_disk, capsys):
    section = CheckpointArguments(save=str(lost_disk))
    with (
        pytest.raises(SystemExit),
        exit_with_message(section, StopRequests(60.0)),
        naming_disk(lost_disk / "iter_0000004", lost_disk / ".writing_iter_0000004"),
    ):
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
    (line,) = capsys.readouterr().err.splitlines()
    assert "iter_0000004 was not written, because the disk " in line and " is no longer mounted; the same" in line
    assert line.endswith(f"once {lost_disk} can be read again (now: Transport endpoint is not connected)")


def test_an_error_without_a_number_is_blamed_on_a_disk_that_is_lost(lost_disk):
    assert "is no longer mounted" in disk_fault(lost_disk / "x", RuntimeError("file write failed"))


def test_another_error_is_not_blamed_on_the_disk(tmp_path):
    assert disk_fault(tmp_path, ValueError("a model")) is None
    assert disk_fault(tmp_path, FileNotFoundError(errno.ENOENT, "gone")) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", WORDS)
def test_a_failed_save_leaves_earlier_checkpoints_and_nothing_half_written(tmp_path, capsys, number):
    save_checkpoint(tmp_path, 2)

    def fail(folder):
        (folder / "half").write_text("")
        raise OSError(number, os.strerror(number))

    section = CheckpointArguments(save=str(tmp_path))
    with pytest.raises(SystemExit) as ended, exit_with_message(section, StopRequests(60.0)):
        driver(tmp_path, fail).save(4, {})
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"miles train: the run stopped: --save {tmp_path}: the checkpoint after 4 iterations was ")
    assert WORDS[number] in line and line.endswith(f"--load {tmp_path} continues from the last checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000002"]
    assert check_checkpoint(tmp_path / "iter_0000002") is not None


def test_the_kernel_refuses_to_write(tmp_path):
    save_checkpoint(tmp_path, 2)

    def write(folder):
        with file_limit(1000):
            (folder / "weights").write_bytes(bytes(10_000))

    with pytest.raises(WriteFailed, match="ulimit"):
        driver(tmp_path, write).save(4, {})
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000002"]


def test_the_disk_is_probed_if_the_error_has_no_number(tmp_path):
    """PyTorch's own errors, sent from another rank, have none."""
    with file_limit(1000):
        assert "ulimit" in disk_fault(tmp_path, RuntimeError("unexpected pos 64 vs 0"))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path):
    with mounted_disk(tmp_path / "disk") as disk:
        yield disk


def test_a_real_full_disk_is_named_though_pytorch_does_not_say_so(small_disk):
    save_checkpoint(small_disk, 2)

    def write(folder):
        with one_rank(), save_errors(folder):
            dcp.save({"w": torch.zeros(2**20)}, checkpoint_id=folder)

    with pytest.raises(WriteFailed, match=f"the disk tmpfs at {small_disk} .* is full; earlier checkpoints") as raised:
        driver(small_disk, write).save(4, {})
    assert "No space left" not in str(raised.value.__cause__)
    assert [path.name for path in small_disk.iterdir()] == ["iter_0000002"]
    assert check_checkpoint(small_disk / "iter_0000002") is not None


def test_a_read_only_disk_is_refused_at_the_start(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with (
        pytest.raises(ValueError, match=r"--save .*: cannot be written, because the disk tmpfs at .* is read-only; "),
        locked_folders([("--save", small_disk / "run")]),
    ):
        pass


def test_any_other_failure_is_raised_as_it_is(tmp_path):
    def fail(folder):
        raise FileNotFoundError(errno.ENOENT, "gone")

    with pytest.raises(FileNotFoundError, match="gone"):
        driver(tmp_path, fail).save(4, {})


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match=r"--save .*: cannot be written, because Not a directory; correct that"),
        locked_folders([("--save", tmp_path / "file" / "folder")]),
    ):
        pass
