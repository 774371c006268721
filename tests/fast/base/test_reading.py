"""A folder that cannot be read is one sentence: a run must not continue as if it held no checkpoint."""

import errno
import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from miles.config.checkpoint import CheckpointArguments, explain_checkpoint, first_iteration
from miles.config.model import ModelArguments
from miles.config.settings import Settings
from miles.run.restarts import loading_its_own
from miles.run.resume import check_frozen_models, check_load_folder, own_save_folder, resume_point

NOBODY = 65534


@contextmanager
def as_nobody():
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def load(path):
    check_load_folder(CheckpointArguments(load=path))


def resume(path):
    resume_point(CheckpointArguments(load=path))


def save(path):
    own_save_folder(CheckpointArguments(save=path))


def restart(path):
    loading_its_own(replace(Settings(), checkpoint=CheckpointArguments(save=path)))


def ref_load(path):
    check_frozen_models(ModelArguments(ref_load=path))


READERS = {load: "--load", resume: "--load", save: "--save", restart: "--save", ref_load: "--ref-load"}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("inside", ["", "run"])
def test_a_folder_without_permission_is_refused_in_one_sentence(tmp_path, read, inside):
    closed = tmp_path / "closed"
    (closed / "run" / "iter_0000004").mkdir(parents=True)
    closed.chmod(0o700)
    path = str(closed / inside)
    with as_nobody(), pytest.raises(ValueError) as refused:
        read(path)
    assert str(refused.value).startswith(f"{READERS[read]} {path}: {closed}")
    assert "cannot be read (Permission denied), so it is not known whether checkpoints are there; " in str(
        refused.value
    )


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_does_not_answer_is_named(tmp_path, monkeypatch, read, number):
    def fails(path):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "iterdir", fails)
    with pytest.raises(ValueError, match=rf"^{READERS[read]} {tmp_path}: {tmp_path} cannot be read "):
        read(str(tmp_path))


def test_explain_says_that_a_folder_cannot_be_read(tmp_path):
    tmp_path.chmod(0o700)
    section = CheckpointArguments(load=str(tmp_path))
    assert first_iteration(section) == 0
    with as_nobody():
        assert first_iteration(section) is None
        assert explain_checkpoint(section) == [f"{tmp_path}: cannot be read (Permission denied), so the run is refused"]
