"""benchmarks/records.py: the tables of the documentation show the newest records."""

from dataclasses import replace

import pytest

from tests.fast.support.benchmark_scripts import FOLDER, benchmark


@pytest.fixture(scope="module")
def records():
    return benchmark("records")


def test_every_comparison_has_a_script_and_a_record(records):
    measured = {record.benchmark for record in records.read_records()}
    for name in {*records.COMPARISONS, *records.TABLES} - records.OF_OTHER_SCRIPTS:
        assert (FOLDER / f"{name}.py").is_file() and name in measured


def test_the_newest_record_under_the_same_conditions_is_shown(records):
    old = next(record for record in records.read_records() if record.benchmark == "torch_engine")
    new = replace(old, date="2099-01-01", figures=old.figures | {"ratio": 99.0})
    other = replace(old, processor="another one")
    table = records.comparisons([old, other, new])
    assert table.count("\n") == 3 and "99 times as fast" in table and "another one" in table


def test_figures_may_be_one_value_or_one_per_line(records):
    assert records.read_json('{\n"gain": 1}\n') == {"gain": 1}
    assert records.read_json('{"gain": 1}\n{"gain": 2}\n') == [{"gain": 1}, {"gain": 2}]
