"""benchmarks/step_history.py: the rows of the history, and the parts that it reports as slower."""

from dataclasses import replace

import pytest

from tests.fast.support.benchmark_scripts import benchmark


@pytest.fixture(scope="module")
def history():
    return benchmark("step_history")


@pytest.fixture
def record(history):
    return history.Record("2026-11-23", "abc1234", "2.13.0", "A processor", "bf16", (60.0, 20.0, 4.0), "a change")


def test_a_row_is_read_as_it_was_written(history, record):
    page = history.HISTORY.read_text(encoding="utf-8")
    before = history.records_in(page)
    assert history.records_in(page + record.row() + "\n") == [*before, record]
    with pytest.raises(ValueError, match="columns"):
        history.records_in(page + "| 2026-11-23 | abc1234 |\n")


def test_only_parts_that_are_more_than_a_tenth_slower_are_reported(history, record):
    assert history.slower_parts(record, replace(record, ratios=(65.9, 10.0, 4.3))) == []
    (line,) = history.slower_parts(record, replace(record, ratios=(60.0, 22.1, 4.0)))
    assert line.startswith("log-probs: 22.10 of the fixed work, 1.10 times the 20.00 of 2026-11-23 (abc1234)")


def test_a_row_is_compared_with_the_last_one_of_its_processor_and_dtype(history, record):
    newer, other = replace(record, date="2026-11-24"), replace(record, processor="Another")
    assert history.last_of_kind([record, newer, other], record) == newer
    assert history.last_of_kind([record, replace(record, dtype="fp32")], replace(record, dtype="fp32")).dtype == "fp32"
    assert history.last_of_kind([other], record) is None
