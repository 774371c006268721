"""The order in which tests/run.sh hands out files."""

from pathlib import Path

from tests.fast.conftest import LONGEST

FAST = Path(__file__).parent


def test_every_file_that_starts_early_exists():
    assert not [file for file in LONGEST if not (FAST / file).is_file()]
    assert len(set(LONGEST)) == len(LONGEST)
