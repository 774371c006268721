"""A checkpoint is either complete or absent."""

from __future__ import annotations

from miles.training.checkpoint_folder import at, newest, publish, staging


def write(root, rollout, text):
    (staging(root, rollout) / "weights").write_text(text)
    return publish(root, rollout)


def test_newest_has_the_most_iterations(tmp_path):
    assert newest(tmp_path) is None and newest(tmp_path / "missing") is None
    for rollout in (9, 100, 20):
        write(tmp_path, rollout, str(rollout))
    found = newest(tmp_path)
    assert found is not None and (found / "weights").read_text() == "100"


def test_a_checkpoint_is_named_itself_or_by_its_folder(tmp_path):
    found = write(tmp_path / "run", 3, "")
    (found / "state.json").write_text("{}")
    assert at(found) == at(tmp_path / "run") == found
    (tmp_path / "hugging_face").mkdir()
    assert at(tmp_path / "hugging_face") is None and at(tmp_path / "owner" / "model") is None


def test_a_staged_folder_is_no_checkpoint(tmp_path):
    done = write(tmp_path, 1, "done")
    (staging(tmp_path, 2) / "weights").write_text("half")
    assert newest(tmp_path) == done


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    (staging(tmp_path, 3) / "half").write_text("")
    assert list(staging(tmp_path, 3).iterdir()) == []
    assert [p.name for p in write(tmp_path, 3, "whole").iterdir()] == ["weights"]


def test_a_checkpoint_saved_again_is_replaced_completely(tmp_path):
    staged = staging(tmp_path, 4)
    (staged / "old_only").write_text("")
    publish(tmp_path, 4)
    leftover = tmp_path / ".replaced_iter_0000004"
    leftover.mkdir()
    (leftover / "rubbish").write_text("")
    assert [p.name for p in write(tmp_path, 4, "new").iterdir()] == ["weights"]
    assert [p.name for p in tmp_path.iterdir()] == ["iter_0000004"]


def test_a_run_killed_while_replacing_leaves_the_older_checkpoint(tmp_path):
    write(tmp_path, 4, "older")
    (tmp_path / "iter_0000004").rename(tmp_path / ".replaced_iter_0000004")
    found = newest(tmp_path)
    assert found is not None and (found / "weights").read_text() == "older"


def test_other_names_are_not_checkpoints(tmp_path):
    for name in ("iter_12", "iter_0000012.old", "hf", "iter_abcdefg"):
        (tmp_path / name).mkdir()
    assert newest(tmp_path) is None
