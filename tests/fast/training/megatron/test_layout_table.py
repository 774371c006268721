"""layouts.md lists every layout, with a measured distance if it is accepted and the reason if it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tolerance import RELATIVE_ERROR

sys.path.insert(0, str(Path(__file__).parent))

from layout_grid import ALSO_REFUSED, KINDS, splits  # noqa: E402
from layout_table import NO_SUCH, PAGE, Page, all_splits, cells_of, row_name  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for the models' configs. All tests share it, because the validator's answers are cached by folder."""
    return tmp_path_factory.mktemp("configs")


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


def test_every_layout_is_measured_or_refused(page, folder):
    """Every accepted layout has a number, and every row is a layout."""
    cells = cells_of(page)
    assert cells.keys() == {row_name(split) for split in all_splits()}
    table = Page(folder)
    for split in all_splits():
        row = cells[row_name(split)]
        without_numbers = table.row(split, [""] * len(KINDS[split.backend]))
        for cell, refused in zip(row, without_numbers, strict=True):
            if refused:
                assert cell == refused, row_name(split)
            else:
                assert float(cell) <= RELATIVE_ERROR, f"{row_name(split)}: {cell}"


def test_the_page_equals_the_output_of_the_command(page, folder):
    """Except for the numbers: rows, reasons and other refusals, in the validator's own words."""
    assert Page(folder).section(cells_of(page)) == page


def test_the_grid_has_every_feature():
    """A feature that is dropped from the grid would otherwise vanish from the page unnoticed."""
    names = " ".join(split.name for split in splits("megatron"))
    for feature in ("TP 2,", "TP 2 with SP", "PP 2", "CP 2", "CP 4", "dynamic CP", "DP 4"):
        assert feature in names
    assert any(row[-1] != NO_SUCH for row in cells_of(PAGE.read_text()).values())
    assert len(ALSO_REFUSED) == len({flags for flags, _ in ALSO_REFUSED})
