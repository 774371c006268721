"""``--save-keep-last`` and ``--save-retain-interval`` keep what they name, and always one complete checkpoint."""

from __future__ import annotations

import pytest

from miles.training.checkpoint_files import all_in, prune, publish, remove_unfinished, staging


@pytest.fixture
def root(tmp_path):
    for iterations in (2, 4, 6, 8, 10):
        (staging(tmp_path, iterations) / "weights").write_text("whole")
        publish(tmp_path, iterations)
    return tmp_path


def left(root):
    return [int(folder.name.removeprefix("iter_")) for folder in all_in(root)]


@pytest.mark.parametrize(
    ("keep_last", "retain_interval", "expected"),
    [
        (None, None, [2, 4, 6, 8, 10]),
        (2, None, [8, 10]),
        (None, 4, [4, 8, 10]),
        (2, 6, [6, 8, 10]),
        (9, None, [2, 4, 6, 8, 10]),
    ],
)
def test_both_sets_are_kept(root, keep_last, retain_interval, expected):
    prune(root / "iter_0000010", keep_last, retain_interval)
    assert left(root) == expected


def test_a_damaged_checkpoint_is_neither_counted_nor_removed(root):
    """The newest is damaged: the last good one is the one before it."""
    (root / "iter_0000008" / "weights").write_text("")
    prune(root / "iter_0000010", 2, None)
    assert left(root) == [6, 8, 10]


def test_what_was_just_saved_stays_beside_newer_ones_that_the_run_passed_over(root):
    """A run passes over a checkpoint with a wrong hash; its size, which is all that is checked here, may be right."""
    prune(root / "iter_0000006", 1, None)
    assert left(root) == [6, 8, 10]


def test_the_reference_stays(root):
    prune(root / "iter_0000010", 1, None, in_use=[root / "iter_0000004"])
    assert left(root) == [4, 10]


def test_a_removal_that_was_killed_leaves_no_checkpoint_and_is_finished_by_the_next_run(root):
    (root / "iter_0000002").rename(root / ".removing_iter_0000002")
    (root / "iter_0000004").rename(root / ".removing_.replaced_iter_0000004")
    assert left(root) == [6, 8, 10]
    remove_unfinished(root)
