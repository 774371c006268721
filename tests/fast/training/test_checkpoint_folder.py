"""A checkpoint is either complete or absent."""

from __future__ import annotations

import os
from pathlib import Path

from miles.training.checkpoint_files import at, bytes_being_written, newest, publish, remove_unfinished, staging


def write(root, rollout, text):
    (staging(root, rollout) / "weights").write_text(text)
    return publish(root, rollout)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_newest_has_the_most_iterations(tmp_path):
    assert newest(tmp_path) is None and newest(tmp_path / "missing") is None
    for rollout in (9, 100, 20):
        write(tmp_path, rollout, str(rollout))
    folder = newest(tmp_path)
    assert folder is not None and (folder / "weights").read_text() == "100"


def test_a_checkpoint_is_named_itself_or_by_its_folder(tmp_path):
    folder = write(tmp_path / "run", 3, "")
    (folder / "state.json").write_text("{}")
    assert at(folder) == at(tmp_path / "run") == folder
    (tmp_path / "hugging_face").mkdir()
    assert at(tmp_path / "hugging_face") is None and at(tmp_path / "owner" / "model") is None


def test_a_staged_folder_is_no_checkpoint(tmp_path):
    done = write(tmp_path, 1, "done")
    (staging(tmp_path, 2) / "weights").write_text("half")
    assert newest(tmp_path) == done


def test_the_size_of_what_is_being_written_is_known(tmp_path):
    assert bytes_being_written(tmp_path) is None
    folder = staging(tmp_path, 2)
    (folder / "critic").mkdir()
    (folder / "a").write_bytes(bytes(100))
    (folder / "critic" / "b").write_bytes(bytes(10))
    assert bytes_being_written(tmp_path) == 110
    publish(tmp_path, 2)
    assert bytes_being_written(tmp_path) is None


def test_a_checkpoint_may_be_published_while_its_size_is_asked(tmp_path, monkeypatch):
    folder = staging(tmp_path, 2)
    (folder / "critic").mkdir()
    (folder / "a").write_bytes(bytes(100))
    (folder / "critic" / "b").write_bytes(bytes(10))
    stat, publishing = Path.stat, [publish]

    def published_first(path, **options):
        if path.parent == folder and publishing:
            publishing.pop()(tmp_path, 2)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", published_first)
    assert bytes_being_written(tmp_path) is None
    assert not publishing and newest(tmp_path) == tmp_path / "iter_0000002"


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    (staging(tmp_path, 3) / "half").write_text("")
    assert list(staging(tmp_path, 3).iterdir()) == []
    assert files(write(tmp_path, 3, "whole")) == ["manifest.json", "weights"]


def test_a_checkpoint_saved_again_is_replaced_completely(tmp_path):
    staged = staging(tmp_path, 4)
    (staged / "old_only").write_text("")
    publish(tmp_path, 4)
    leftover = tmp_path / ".replaced_iter_0000004"
    leftover.mkdir()
    (leftover / "rubbish").write_text("")
    assert files(write(tmp_path, 4, "new")) == ["manifest.json", "weights"]
    assert [p.name for p in tmp_path.iterdir()] == ["iter_0000004"]


def test_a_run_killed_while_replacing_leaves_the_older_checkpoint(tmp_path):
    write(tmp_path, 4, "older")
    (tmp_path / "iter_0000004").rename(tmp_path / ".replaced_iter_0000004")
    folder = newest(tmp_path)
    assert folder is not None and (folder / "weights").read_text() == "older"


def test_half_written_checkpoints_of_killed_runs_are_removed_and_nothing_else(tmp_path):
    write(tmp_path, 1, "done")
    (staging(tmp_path, 2) / "half").write_text("")
    (tmp_path / ".writing_version_0000002").mkdir()
    (tmp_path / ".replaced_iter_0000003").mkdir()  # the only checkpoint after 3 iterations
    remove_unfinished(tmp_path)
    assert files(tmp_path) == [".replaced_iter_0000003", ".writing_version_0000002", "iter_0000001"]
    remove_unfinished(tmp_path / "missing")


def test_the_next_save_removes_what_was_replaced(tmp_path):
    write(tmp_path, 3, "new")
    (tmp_path / ".replaced_iter_0000003").mkdir()
    (tmp_path / ".replaced_iter_0000002").mkdir()
    staging(tmp_path, 4)
    assert files(tmp_path) == [".replaced_iter_0000002", ".writing_iter_0000004", "iter_0000003"]


def test_a_checkpoint_appears_after_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    """Every file and folder is flushed before the rename, and the folder that holds the new name after it."""
    flushed, flush = [], os.fsync

    def record(handle):
        flushed.append((os.readlink(f"/proc/self/fd/{handle}"), (tmp_path / "iter_0000005").exists()))
        flush(handle)

    staged = staging(tmp_path, 5)
    (staged / "critic").mkdir()
    (staged / "critic" / "weights").write_text("1")
    monkeypatch.setattr(os, "fsync", record)
    publish(tmp_path, 5)
    before = {path for path, is_published in flushed if not is_published}
    assert before == {str(staged)} | {str(staged / name) for name in ("critic", "critic/weights", "manifest.json")}
    assert flushed[-1] == (str(tmp_path), True)


def test_a_folder_with_the_name_of_a_checkpoint_is_one_however_damaged(tmp_path):
    (tmp_path / "iter_0000004").mkdir()
    assert at(tmp_path / "iter_0000004") == tmp_path / "iter_0000004"
    (tmp_path / "iter_0000004" / "config.json").write_text("{}")  # a Hugging Face export
    assert at(tmp_path / "iter_0000004") is None


def test_other_names_are_not_checkpoints(tmp_path):
    for name in ("iter_12", "iter_0000012.old", "hf", "iter_abcdefg"):
        (tmp_path / name).mkdir()
    assert newest(tmp_path) is None


def test_files_that_another_thread_removes_meanwhile_are_no_error(tmp_path, monkeypatch):
    folder = tmp_path / ".removing_iter_0000002"
    (folder / "weights").mkdir(parents=True)
    for name in ("manifest.json", "weights/0.distcp"):
        (folder / name).write_text("{}")
    real = os.unlink

    def unlink(path, *, dir_fd=None):
        real(path, dir_fd=dir_fd)  # the other thread was faster
        real(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    remove_unfinished(tmp_path)
    assert not folder.exists()
