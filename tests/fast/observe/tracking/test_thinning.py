"""A file of metrics at its bound: the rows that are kept."""

import json

import pytest

from miles.base.disk_faults import WriteFailed
from miles.observe.run_files import FIRST, TARGET, thin


def written(path, count, names):
    """Write rows of the same length; return that length and their number of bytes."""
    lines = [json.dumps({"step": 10_000 + row, names(row): 0.5}) + "\n" for row in range(count)]
    path.write_text("".join(lines))
    return len(lines[0])


def steps_of(path):
    return [json.loads(line)["step"] - 10_000 for line in path.read_text().splitlines()]


def test_each_kind_of_rows_loses_every_second_one_in_the_middle(tmp_path):
    """Evaluations are in the rows 3, 7, …: thinned with the others they would all be dropped, or all kept."""
    path = tmp_path / "metrics.jsonl"
    width = written(path, 400, lambda row: "eval/x" if row % 4 == 3 else "train/")
    thin(path, int(340 * width / TARGET))
    rows = steps_of(path)
    assert rows[:FIRST] == list(range(FIRST)) and rows[-100:] == list(range(300, 400))
    middle = [row for row in rows if FIRST <= row < 300]
    evaluations, others = ([row for row in middle if (row % 4 == 3) == kind] for kind in (True, False))
    assert evaluations == [row for row in range(FIRST, 300) if row % 4 == 3][::2]
    assert others == [row for row in range(FIRST, 300) if row % 4 != 3][::2]


@pytest.mark.parametrize("rows", [1, 30, 100, 333])  # 1 cannot be met
def test_it_drops_until_the_target_is_met(tmp_path, rows):
    path = tmp_path / "metrics.jsonl"
    width = written(path, 1000, lambda row: "train/")
    thin(path, int(rows * width / TARGET))
    steps = steps_of(path)
    assert len(steps) <= max(rows, FIRST + 10) and steps[-1] == 999 and steps == sorted(steps)


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "metrics.jsonl"
    width = written(path, 100, lambda row: "train/")
    before = path.read_bytes()
    (tmp_path / "metrics.jsonl.new").symlink_to("/dev/full")
    with pytest.raises(WriteFailed, match=r"metrics.jsonl was not written, because the disk .* is full"):
        thin(path, 50 * width)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
