"""benchmarks/records.py: the tables of the documentation show the newest records."""

import pytest

from tests.fast.support.benchmark_scripts import FOLDER, benchmark


@pytest.fixture(scope="module")
def records():
    return benchmark("records")


def test_every_comparison_has_a_script_and_a_record(records):
    measured = {record.benchmark for record in records.read_records()}
    for name in {*records.COMPARISONS, *records.TABLES} - records.OF_OTHER_SCRIPTS:
        assert (FOLDER / f"{name}.py").is_file() and name in measured
